"""Draws a method's idea: three clients as columns, layers as boxes, and the server with its rule above.

A picture is a piece of HTML in the colours of the site's theme. A method's configuration describes it by these keys,
and {} is FedAvg's picture without words:

net: a client's layers from below (nets: of each client): S common, P the client's own, M mixed for the client, F fixed,
  C common to a cluster, G a copy; a lower-case letter is a thin layer, a point a gap. SSS where nothing is said.
parts: of each client's net, where its units begin in the whole net, and their share of the width.
beside: what else a client has: layers, or points, bars, mask, valley, correction. tie: spring, arrow, back, both, plus.
adapter: factors A and B. local: the clients' words.
server: mean, step, weights, models, mix, clusters, classes, outputs, points, hyper, generator, data, ring, none; mean
  where nothing is said. by: the server's words. samples: the server has some. up: a word in place of the table's.
"""

import math
from html import escape
from typing import Any

import catalogue

WIDTH, HEIGHT = 300, 166
CLIENTS = (50, 150, 250)
"""Centres of the clients' columns."""
BOX, LAYER, THIN, GAP = 24, 12, 6, 3
FLOOR = 138
"""Lower edge of the clients' layers."""
COLOURS = {"S": "shared", "F": "fixed", "G": "copy"}
DEFAULTS = {
    "mean": "mean",
    "step": "server step",
    "weights": "weighted mean",
    "models": "all models",
    "mix": "a mix for each",
    "clusters": "a model per cluster",
    "classes": "a model per class",
    "outputs": "mean outputs",
    "points": "mean per class",
    "hyper": "hypernetwork",
    "generator": "mean; generator",
    "data": "all samples",
}
"""Servers' drawings, each with its words."""
LETTERS = {
    "S": "common",
    "P": "the client's own",
    "M": "mixed for the client",
    "F": "fixed",
    "C": "common to a cluster",
    "G": "a copy",
}
"""Kinds of layers. A layer of normalisation or bias is a lower-case letter, and a point is a gap."""


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a box of a kind's colour."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" class="{kind}"/>'


def path(points: str, kind: str = "line") -> str:
    """Return a line."""
    return f'<path d="{points}" class="{kind}"/>'


def text(x: float, y: float, words: str, anchor: str = "middle", kind: str = "") -> str:
    """Return words at a place."""
    chosen = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{chosen}>{escape(words)}</text>'


def layer(x: float, y: float, height: float, letter: str, client: int) -> str:
    """Return one layer of a client's net, with its left upper corner.

    Args:
        x: left edge.
        y: upper edge.
        height: height of the box.
        letter: kind of the layer.
        client: the client's number, 0 to 2.
    """
    if letter == "P":
        return rect(x, y, BOX, height, f"client{client}")
    if letter == "C":
        return rect(x, y, BOX, height, "shared" if client < 2 else "second")
    if letter == "M":
        # the client's own colour has half of the width
        shares = [0.5 if one == client else 0.25 for one in range(3)]
        edges = [x + BOX * sum(shares[:one]) for one in range(3)]
        bands = (rect(edges[one], y, BOX * shares[one], height, f"client{one}") for one in range(3))
        return "".join(bands)
    return rect(x, y, BOX, height, COLOURS[letter])


def stack(x: float, floor: float, letters: str, client: int) -> str:
    """Return a net: layers from the lowest to the highest.

    Args:
        x: left edge.
        floor: lower edge of the lowest layer.
        letters: kinds of layers.
        client: the client's number.
    """
    drawn, y = [], floor
    for letter in letters:
        height = THIN if letter.islower() else LAYER
        y -= height
        if letter != ".":
            drawn.append(layer(x, y, height, letter.upper(), client))
        y -= GAP
    return "".join(drawn)


def narrow(x: float, floor: float, letters: str, begin: float, share: float) -> str:
    """Return a client's units of a common net, in front of the whole net.

    Args:
        x: left edge.
        floor: lower edge of the lowest layer.
        letters: kinds of layers.
        begin: where the units begin, as a share of the width.
        share: their share of the width.
    """
    places = range(len(letters))
    own = (rect(x + BOX * begin, floor - LAYER - (LAYER + GAP) * k, BOX * share, LAYER, "shared") for k in places)
    return stack(x, floor, "G" * len(letters), 0) + "".join(own)


def dots(x: float, floor: float) -> str:
    """Return samples or class means in the plane of features."""
    places = [(4, 30, 0), (10, 34, 0), (17, 26, 1), (21, 32, 1), (7, 10, 2), (14, 6, 2)]
    return "".join(f'<circle cx="{x + a:g}" cy="{floor - b:g}" r="2.6" class="client{c}"/>' for a, b, c in places)


def bars(x: float, floor: float, heights: tuple[int, ...], kinds: tuple[str, ...]) -> str:
    """Return a small chart of bars."""
    return "".join(
        rect(x + 9 * k, floor - height, 7, height, kind)
        for k, (height, kind) in enumerate(zip(heights, kinds, strict=True))
    )


def mask(x: float, floor: float, client: int) -> str:
    """Return a mask of entries: some on, some off."""
    on = ((0, 1, 3, 6, 8, 11), (1, 2, 4, 7, 9, 10), (0, 3, 4, 5, 8, 10))[client]
    return "".join(
        rect(x + 8 * (k % 3), floor - 10 * (k // 3 + 1), 7, 8, f"client{client}" if k in on else "copy")
        for k in range(12)
    )


def cylinder(x: float, floor: float) -> str:
    """Return samples, as a store of data."""
    top = floor - 24
    side = f"M{x} {top}v20a11 4 0 0 0 22 0v-20"
    return path(side, "store") + f'<ellipse cx="{x + 11}" cy="{top}" rx="11" ry="4" class="store"/>'


def tie(x: float, kind: str) -> str:
    """Return the tie between two parts of a client.

    Args:
        x: the middle between both.
        kind: spring, arrow, back, both or plus.
    """
    y = FLOOR - 21
    if kind == "spring":
        return path(f"M{x - 8} {y}l2 -4l3 8l3 -8l3 8l3 -8l2 4")
    if kind == "plus":
        return path(f"M{x - 4} {y}h8M{x} {y - 4}v8")
    right, left = "m-4 -3l4 3l-4 3", f"M{x - 3} {y - 3}l-4 3l4 3"
    return path(f"M{x - 7} {y}h14" + {"arrow": right, "back": left, "both": right + left}[kind])


def part(x: float, floor: float, what: str, client: int) -> str:
    """Return the part beside a client's net: a drawing by name, or layers."""
    if what == "points":
        return dots(x, floor)
    if what == "bars":
        return bars(x, floor, ((30, 12, 4), (6, 28, 14), (10, 5, 34))[client], (f"client{client}",) * 3)
    if what == "mask":
        return mask(x, floor, client)
    if what == "valley":
        return path(f"M{x} {floor - 34}q3 30 12 30t12 -30", "line") + (
            f'<circle cx="{x + 12}" cy="{floor - 8}" r="3" class="shared"/>'
        )
    if what == "correction":
        return path(f"M{x + 2} {floor - 4}v-26m-3 4l3 -4l3 4") + path(
            f"M{x + 2} {floor - 30}l16 10m-5 0l5 0l-2 -4.5", f"stroke{client}"
        )
    return stack(x, floor, what, client)


def adapters(x: float, floor: float, letters: str, client: int) -> str:
    """Return low-rank factors beside a net, in pairs of A and B."""
    drawn = []
    for k, letter in enumerate(letters):
        if letter == ".":
            continue
        column, row = x + 15 * (k // 2), floor - 19 * (1 + k % 2)
        kind = f"client{client}" if letter == "P" else COLOURS[letter]
        drawn += [rect(column, row - 1, 13, 17, kind), text(column + 6.5, row + 11.5, "AB"[k % 2], kind="factor")]
    return "".join(drawn)


def layers(idea: dict[str, Any], number: int = 1) -> str:
    """Return the layers of a client's net."""
    return idea["nets"][number] if "nets" in idea else idea.get("net", "SSS")


def client(number: int, idea: dict[str, Any]) -> str:
    """Return a client's column."""
    centre = CLIENTS[number]
    net = layers(idea, number)
    beside = idea.get("beside")
    if "parts" in idea:
        return narrow(centre - BOX / 2, FLOOR, net, *idea["parts"][number])
    if "adapter" in idea:
        return stack(centre - 27, FLOOR, net, number) + adapters(centre + 3, FLOOR, idea["adapter"], number)
    if not beside:
        return stack(centre - BOX / 2, FLOOR, net, number)
    drawn = stack(centre - BOX - 10, FLOOR, net, number) + part(centre + 10, FLOOR, beside, number)
    return drawn + (tie(centre, idea["tie"]) if "tie" in idea else "")


def server(idea: dict[str, Any]) -> str:
    """Return the drawing of a server's rule in the box of the server."""
    floor, middle = 48, WIDTH / 2
    kind, net = idea.get("server", "mean"), layers(idea)
    if "adapter" in idea:
        own = "".join("." if letter == "P" else letter for letter in idea["adapter"][:2])
        common = adapters(middle + 16, floor, own, 0)
    else:
        common = stack(middle + 13, floor, "".join(one if one.upper() in "SFC" else "." for one in net), 0)
    every = ("client0", "client1", "client2")
    if kind in ("mean", "weights"):
        heights = (16, 16, 16) if kind == "mean" else (28, 9, 18)
        arrow = path(f"M{middle - 8} {floor - 20}h14m-4 -3l4 3l-4 3")
        return bars(middle - 38, floor - 6, heights, every) + arrow + common
    if kind == "step":
        arrow = path(f"M{middle - 10} {floor - 20}q10 -14 20 0m-1 -5l1 5l-5 -1")
        return stack(middle - 37, floor, "G" * len(net), 0) + arrow + common
    if kind in ("models", "mix", "clusters", "classes"):
        mixed = net if "M" in net else "MMM"
        letters = {"models": "PPP", "mix": mixed, "clusters": "CCC", "classes": "SSP"}[kind]
        places = (0, 1, 2) if kind != "clusters" else (0.5, 2)
        return "".join(stack(middle - 44 + 32 * k, floor, letters, int(k)) for k in places)
    if kind == "outputs":
        shapes = ((26, 10, 5), (8, 28, 12), (10, 6, 24))
        return "".join(bars(middle - 45 + 33 * k, floor - 4, shapes[k], ("shared",) * 3) for k in range(3))
    if kind == "points":
        crosses = "".join(
            path(f"M{middle + a - 5} {floor - b}h10m-5 -5v10", f"stroke{k}")
            for k, (a, b) in enumerate([(-24, 12), (0, 30), (24, 14)])
        )
        return crosses
    if kind in ("hyper", "generator"):
        shape = path(f"M{middle - 40} {floor - 28}v16l24 12v-40z", "solid")
        arrow = path(f"M{middle - 12} {floor - 20}h14m-4 -3l4 3l-4 3")
        return shape + arrow + (stack(middle + 10, floor, "MMM", 1) if kind == "hyper" else dots(middle + 10, floor))
    return cylinder(middle - 11, floor - 6)


def travels(words: str) -> list[str]:
    """Return the names of entries, without the bytes of each.

    >>> travels("2.00 weights, control of its own")
    ['weights', 'control']

    Args:
        words: a cell of methods/table.csv.
    """
    known = words.replace("nothing", "").replace(" of its own", "")
    names = [name.strip().lstrip("<0123456789.").strip() for name in known.split(",")]
    return [name for name in names if name]


def arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Return an arrow from one place to another."""
    length = math.dist(start, end)
    along = ((end[0] - start[0]) / length, (end[1] - start[1]) / length)
    # both sides of the head, three units beside the line
    sides = [(end[0] - 4 * along[0] + 3 * s * along[1], end[1] - 4 * along[1] - 3 * s * along[0]) for s in (1, -1)]
    points = [start, end, sides[0], end, sides[1]]
    return path("".join(f"{turn}{x:.1f} {y:.1f}" for turn, (x, y) in zip("MLMLL", points, strict=True)))


def arrows(up: list[str], down: list[str]) -> str:
    """Return the arrows between clients and server, and the names of the entries."""
    drawn = []
    for x in CLIENTS:
        near = WIDTH / 2 + (x - WIDTH / 2) * 0.36
        for shift, label in ((-5, up), (5, down)):
            ends = [(x + shift, 92.0), (near + shift, 69.0)]
            if label:
                drawn.append(arrow(*(ends if label is up else ends[::-1])))
    for x, anchor, sign, label in ((2, "start", "\u2191", up), (WIDTH - 2, "end", "\u2193", down)):
        lines = [f"{sign} {label[0]}", *label[1:]] if label else []
        drawn += [text(x, 14 + 13 * k, line, anchor) for k, line in enumerate(lines)]
    return "".join(drawn)


def words(name: str, idea: dict[str, Any], up: list[str], down: list[str]) -> str:
    """Return a picture in words, for readers who don't see the picture."""
    kinds = ", ".join(dict.fromkeys(LETTERS[letter.upper()] for letter in layers(idea)))
    kind = idea.get("server", "mean")
    rule = idea.get("by") or DEFAULTS.get(kind, "")
    facts = [f"layers from below: {kinds}", f"server: {rule}" if rule else "no server"]
    facts += [f"up: {', '.join(up)}"] * bool(up) + [f"down: {', '.join(down)}"] * bool(down)
    return f"{name}. {'; '.join(facts)}."


def picture(name: str, row: dict[str, str]) -> str:
    """Return a method's picture as a block of MyST.

    Args:
        name: the method's name.
        row: its row of methods/table.csv.
    """
    return block(svg(name, catalogue.declared()[name]["picture"], row))


def block(html: str) -> str:
    """Return HTML as a block of MyST."""
    return f"```{{raw}} html\n{html}\n```\n"


def svg(name: str, idea: dict[str, Any], row: dict[str, str]) -> str:
    """Return the picture of a method's idea in one line of HTML.

    Args:
        name: the method's name.
        idea: its description.
        row: its row of methods/table.csv.
    """
    up = [idea["up"]] if "up" in idea else travels(row["up"])
    down = travels(row["down"])
    kind = idea.get("server", "mean")
    drawn = []
    if kind == "ring":
        drawn += [path(f"M{a + 34} 116H{a + 64}m-4 -3l4 3l-4 3") for a in CLIENTS[:2]]
        drawn.append(path(f"M{CLIENTS[2]} 86V62H{CLIENTS[0]}V86m-3 -4l3 4l3 -4"))
        up, down = [], []
    elif kind != "none":
        drawn.append('<rect x="89" y="2" width="122" height="64" rx="6" class="room"/>')
        drawn.append(server(idea))
        if idea.get("samples"):
            drawn.append(cylinder(183, 42))
        drawn.append(text(WIDTH / 2, 61, idea.get("by") or DEFAULTS[kind]))
        drawn.append(arrows(up, down))
    drawn += [client(number, idea) for number in range(3)]
    if "local" in idea:
        drawn.append(text(WIDTH / 2, 158, idea["local"]))
    top = {"none": 86, "ring": 54}.get(kind, 0)
    seen = (HEIGHT if "local" in idea else FLOOR + 6) - top
    label = escape(words(name, idea, up, down), quote=True)
    box = f"0 {top} {WIDTH} {seen}"
    return f'<svg class="idea" viewBox="{box}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'


def legend() -> str:
    """Return the key to the colours of all pictures."""
    kinds = [("S", "common"), ("P", "a client's own"), ("M", "mixed for a client"), ("F", "fixed"), ("G", "a copy")]
    drawn = []
    for k, (letter, word) in enumerate(kinds):
        x, y = 2 + 150 * (k % 2), 6 + 22 * (k // 2)
        drawn += [layer(x, y, LAYER, letter, 0), text(x + BOX + 6, y + 10, word, "start")]
    return f'<svg class="idea key" viewBox="0 0 {WIDTH} 68" role="img" aria-label="colours">{"".join(drawn)}</svg>'

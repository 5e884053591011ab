"""Times of a convolution of many clients, each with its own weights, computed in three ways.

    python benchmarks/convolutions.py [--repeats 7] [--threads 1] [--accelerator gpu] [--precision bf16-mixed]

Grouped is what vmap makes of it: one convolution with a group a client. Unfolded is a matrix product of the clients'
patches, laid side by side, with their weights. Alone is a convolution a client. Each is timed forwards and backwards,
with the gradient of the inputs but for a net's first layer; they take turns. Times are the process's on a CPU and the
clock's elsewhere, medians in milliseconds. All are compared in float64 first. Settings are torch's own: on a GPU its
float32 convolutions round to TF32, and its matrix products don't.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F


class Shape(NamedTuple):
    """A convolution, of images as wide as high; a net's first has images of up to three channels."""

    clients: int
    channels: int
    side: int
    outputs: int
    kernel: int
    stride: int = 1
    padding: int = 0


BATCH = 10
SHAPES = {
    "CNN, first": Shape(20, 3, 32, 32, 5),
    "CNN, second": Shape(20, 32, 14, 64, 5),
    "LeNet5, first": Shape(20, 1, 28, 6, 5),
    "LeNet5, second": Shape(20, 6, 12, 16, 5),
    "ResNet-18, 64 channels": Shape(4, 64, 32, 64, 3, padding=1),
    "ResNet-18, 128 to 256": Shape(4, 128, 16, 256, 3, stride=2, padding=1),
    "ResNet-18, 256 channels": Shape(4, 256, 8, 256, 3, padding=1),
    "ResNet-18, 512 channels": Shape(4, 512, 4, 512, 3, padding=1),
}


def grouped(x: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    """As the vectorised engine: inputs ``[clients, n, ...]``, weights ``[clients, ...]``."""
    return vmap(lambda x, weight: F.conv2d(x, weight, None, shape.stride, shape.padding))(x, weight)


def unfolded(x: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    """By a batched matrix product of weights ``[outputs, patch]`` and patches ``[patch, n * places]``."""

    def one(x: Tensor, weight: Tensor) -> Tensor:
        patches = F.pad(x, (shape.padding,) * 4).unfold(2, shape.kernel, shape.stride)
        patches = patches.unfold(3, shape.kernel, shape.stride)
        n, _, height, width = patches.shape[:4]
        columns = patches.permute(1, 4, 5, 0, 2, 3).reshape(weight[0].numel(), -1)
        return (weight.flatten(1) @ columns).view(-1, n, height, width).transpose(0, 1)

    return vmap(one)(x, weight)


def alone(x: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    """One client after another."""
    pairs = zip(x.unbind(), weight.unbind(), strict=True)
    return torch.stack([F.conv2d(images, own, None, shape.stride, shape.padding) for images, own in pairs])


WAYS: list[Callable[[Tensor, Tensor, Shape], Tensor]] = [grouped, unfolded, alone]


def measure(shape: Shape, repeats: int, device: torch.device, autocast: bool) -> list[float]:
    """Median milliseconds of each way."""
    leaf = shape.channels > 3
    size = shape.side
    x = torch.randn(shape.clients, BATCH, shape.channels, size, size, device=device, requires_grad=leaf)
    weight = torch.randn(shape.clients, shape.outputs, shape.channels, shape.kernel, shape.kernel, device=device)
    weight = (weight / weight[0, 0].numel() ** 0.5).requires_grad_()

    def step(way: Callable[[Tensor, Tensor, Shape], Tensor], x: Tensor, weight: Tensor) -> list[Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            # what comes next reads it, in whatever order it lies
            loss = way(x, weight, shape).relu().square().sum()
        return list(torch.autograd.grad(loss, [x, weight] if leaf else [weight]))

    def clock() -> float:
        if device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(device)
        return time.perf_counter()

    if not autocast:
        exact = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in (x, weight)]
        for way in WAYS:
            torch.testing.assert_close(step(way, *exact), step(grouped, *exact), rtol=1e-9, atol=1e-9)
    times: list[list[float]] = [[] for _ in WAYS]
    # the first ones aren't counted: libraries choose how they compute a shape
    for repeat in range(repeats + 2):
        for way, taken in zip(WAYS, times, strict=True):
            start = clock()
            step(way, x, weight)
            if repeat > 1:
                taken.append(1000 * (clock() - start))
    return [statistics.median(taken) for taken in times]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="timed steps of each way")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed"], default="32-true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if args.accelerator == "gpu" else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"| {args.precision}, {name} | clients | {' | '.join(f'{way.__name__}, ms' for way in WAYS)} |")
    print("| --- " * (2 + len(WAYS)) + "|")
    for title, shape in SHAPES.items():
        taken = measure(shape, args.repeats, device, args.precision == "bf16-mixed")
        print(f"| {title} | {shape.clients} | {' | '.join(f'{ms:.2f}' for ms in taken)} |", flush=True)


if __name__ == "__main__":
    main()

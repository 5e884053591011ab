// The version picker: the versions beside this one, by the list that docs/versions.py writes.
const picker = document.querySelector(".sidebar-versions");
const top_ = new URL(picker.dataset.top, location.href);
const [current, ...page] = location.pathname.slice(top_.pathname.length).split("/");

fetch(new URL("versions.json", top_)).then((answer) => answer.json()).then((names) => {
  const select = picker.querySelector("select");
  names.forEach((name) => select.add(new Option(name, name, false, name === current)));
  select.addEventListener("change", async () => {
    // a page that the other version hasn't leads to its first page
    const same = new URL(`${select.value}/${page.join("/")}`, top_);
    const there = await fetch(same, { method: "HEAD" }).then((answer) => answer.ok, () => false);
    location.assign(there ? same : new URL(`${select.value}/`, top_));
  });
  picker.hidden = false;
}).catch(() => {
  // a build alone, or a file on this machine: there is nothing to pick
});

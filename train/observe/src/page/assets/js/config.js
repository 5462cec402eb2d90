// The configurations of the compared runs beside each other.

function configView() {
  const differing = h("section", { class: "panel" });
  const filter = h("input", { type: "search", placeholder: "optim", oninput: () => show() });
  const all = h("div");
  const root = h("div", { class: "view" }, differing, h("section", { class: "panel" },
    h("div", { class: "headed" }, h("h2", null, "All settings"), h("label", null, "Only keys with ", filter)), all));
  let answer = { runs: [], keys: [] }, asked = "";

  function table(caption, rows) {
    if (!rows.length) return h("p", { class: "quiet" }, "None.");
    const heads = answer.runs.map((id) => h("th", { scope: "col" }, h("span", { class: "key", style: { "--key": runColor(id) } }), id));
    return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, h("table", { class: "config" }, h("caption", { class: "unseen" }, caption),
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Key"), heads)),
      h("tbody", null, rows.map(({ key, values }) => h("tr", null, h("th", { scope: "row" }, h("code", null, key)), values.map((value) =>
        h("td", null, value === null ? h("span", { class: "quiet" }, "not set") : h("code", null, value))))))));
  }

  function show() {
    const differ = answer.keys.filter((row) => row.differs);
    fill(differing, h("h2", null, "Differences"), answer.runs.length < 2 ? h("p", { class: "quiet" }, "Choose several runs above to compare them.")
      : differ.length ? table("Settings in which the runs differ", differ) : h("p", { class: "quiet" }, "These runs have the same settings."));
    const wanted = filter.value.trim().toLowerCase();
    fill(all, table("All settings", answer.keys.filter((row) => row.key.toLowerCase().includes(wanted))));
  }

  async function update() {
    const run = comparedRuns().map((one) => one.id), name = JSON.stringify([run, theme()]);
    if (name === asked) return;
    answer = run.length ? await ask("/api/config", { run }) : { runs: [], keys: [] };
    asked = name;
    show();
  }
  return { root, update };
}

// The configurations of the compared runs next to each other.

function configView() {
  const differing = h("section", { class: "panel" });
  const filter = h("input", { type: "search", placeholder: "optim", oninput: () => show() });
  const all = h("div");
  const root = h("div", { class: "view" }, differing, h("section", { class: "panel" },
    h("div", { class: "headed" }, h("h2", null, "All settings"), h("label", null, "Only keys with ", filter)), all));
  let answer = { runs: [], keys: [] }, asked = "";

  const quiet = (text) => h("p", { class: "quiet" }, text);
  const written = (value) => (value === null ? h("span", { class: "quiet" }, "not set") : h("code", null, value === "" ? '""' : value));
  const headed = (row) => ({ ...row, head: () => h("code", null, row.key) });

  function show() {
    const places = answer.runs.map((id, place) => ({ id, place, head: () => [keyOf(lookOf(id)), id] })).filter(({ id }) => state.compared.has(id));
    const differs = ({ values }) => places.some(({ place }) => values[place] !== values[places[0].place]);
    const differ = answer.keys.filter(differs).map(headed);
    fill(differing, h("h2", null, "Differences"), places.length < 2 ? quiet("Choose several runs above to compare them.") : !differ.length ? quiet("These runs have the same settings.")
      : grid("Settings in which the runs differ", ["Key", "Run"], differ, places, (row, { place }) => written(row.values[place]), { class: "config" }));
    const wanted = filter.value.trim().toLowerCase();
    const shown = answer.keys.filter((row) => row.key.toLowerCase().includes(wanted)).map(headed);
    fill(all, shown.length && places.length ? grid("All settings", ["Key"], shown, [{ head: () => "Value" }],
      (row) => (differs(row) ? h("span", { class: "quiet" }, "differs, see above") : written(row.values[places[0].place])), { class: "config" }) : quiet("None."));
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

// The configurations, the generated texts and the events of runs.

/** The configurations of the compared runs, next to each other. */
function configView() {
  const differing = h("section", { class: "panel" });
  const filter = h("input", { type: "search", placeholder: "optim", oninput: () => show() });
  const all = h("div");
  const root = h("div", { class: "view" }, differing, h("section", { class: "panel" },
    h("div", { class: "headed" }, h("h2", null, "All settings"), h("label", null, "Only keys with ", filter)), all));
  let answer = { runs: [], keys: [] }, asked = "";

  const quiet = (text) => h("p", { class: "quiet" }, text);
  const written = (value) => (value === null ? h("span", { class: "quiet" }, "not set") : h("code", null, value === "" ? '""' : value));
  const headed = (row) => ({ ...row, head: () => h("code", null, breakable(row.key)) });

  function show() {
    const places = answer.runs.map((id, place) => ({ id, place, head: () => [keyOf(lookOf(id)), breakable(id)] })).filter(({ id }) => state.compared.has(id));
    const differs = ({ values }) => places.some(({ place }) => values[place] !== values[places[0].place]);
    const differ = answer.keys.filter(differs).map(headed);
    fill(differing, h("h2", null, "Differences"), places.length < 2 ? quiet("Select several runs above to compare them.") : !differ.length ? quiet("These runs have the same settings.")
      : grid("Settings in which the runs differ", ["Key", "Run"], differ, places, (row, { place }) => written(row.values[place]), { class: "config" }));
    const wanted = filter.value.trim().toLowerCase();
    const shown = answer.keys.filter((row) => row.key.toLowerCase().includes(wanted)).map(headed);
    fill(all, shown.length && places.length ? grid("All settings", ["Key"], shown, [{ head: () => "Value" }],
      (row) => (differs(row) ? h("span", { class: "quiet" }, "differs, see above") : written(row.values[places[0].place])), { class: "config" }) : quiet("None."));
  }

  async function update() {
    const name = JSON.stringify([[...state.compared], theme()]);
    if (name === asked) return;
    answer = state.compared.size ? await ask("/api/config", { run: comparedNames() }) : { runs: [], keys: [] };
    asked = name;
    show();
  }
  return { root, update };
}

/** The texts that a run has generated. */
function samplesView() {
  const select = h("select", { onchange: () => show() });
  const list = h("div", { class: "samples" });
  const title = h("h2", null, "Generated text");
  const root = h("div", { class: "view" }, h("section", { class: "panel" }, h("div", { class: "headed" }, title, h("label", null, "Prompt ", select)), list));
  let answer = { samples: [], total: 0 }, asked = "";

  function show() {
    const shown = answer.samples.filter((sample) => select.value === "" || sample.prompt === select.value);
    const steps = [...new Set(shown.map((sample) => sample.step))];
    if (!steps.length) return void fill(list, h("p", { class: "quiet" }, "There is no generated text. Set sample.every and sample.prompts to generate text during training."));
    fill(list, steps.map((step) => h("article", null, h("h3", null, `Step ${format.count(step)}`), shown.filter((sample) => sample.step === step).reverse()
      .map((sample) => h("blockquote", null, h("b", null, sample.prompt), sample.text)))));
  }

  async function update() {
    const run = detailRun();
    const name = run && `${run.id} ${run.samples}`;
    if (!run || name === asked) return;
    answer = await ask("/api/samples", { run: run.id });
    asked = name;
    setText(title, `Text that ${run.id} has generated`);
    const prompts = [...new Set(answer.samples.map((sample) => sample.prompt))], was = select.value;
    fill(select, h("option", { value: "" }, "All"), prompts.map((prompt) => h("option", { value: prompt }, prompt.length > 40 ? `${prompt.slice(0, 39)}…` : prompt)));
    select.value = prompts.includes(was) ? was : "";
    show();
  }
  return { root, update };
}

function eventsView() {
  const title = h("h2", null, "Events");
  const saved = h("section", { class: "panel" });
  const table = new Table("Events", [
    { name: "When", cell: (event) => format.moment(event.time), value: (event) => event.time },
    { name: "Step", isNumber: true, downFirst: true, cell: (event) => format.count(event.step), value: (event) => event.step },
    { name: "Kind", cell: (event) => kindBadge(event.kind), value: (event) => event.kind },
    { name: "Description", class: "words", cell: (event) => event.text, value: (event) => event.text },
  ]);
  const missing = h("div");
  const root = h("div", { class: "view" }, missing, saved, h("section", { class: "panel" }, title, table.element));

  async function update() {
    const run = detailRun();
    if (!run) return;
    const answer = await eventsOf(run);
    const count = (kind) => answer.kinds[kind] ?? 0;
    const checkpoints = answer.events.filter((event) => event.kind === "checkpoint");
    fill(missing, noticesOf(run));
    fill(saved, h("h2", null, "Checkpoints"), checkpoints.length || known(run.saved)
      ? h("p", null, `The newest is from step ${format.count(run.saved ?? checkpoints[0].step)}. `, checkpoints.length ? `${answer.total > answer.events.length ? `Of the newest ${answer.events.length} events: written` : "Written"} at ${checkpoints.length === 1 ? "step" : "steps"} ${checkpoints.map((event) => format.count(event.step)).join(", ")}.` : "")
      : h("p", { class: "quiet" }, "There is no checkpoint yet."));
    setText(title, `${run.id}: ${plural(answer.total, "event")}, ${plural(count("resume"), "restart")}, ${plural(count("skipped"), "skipped step")}`);
    table.set(answer.events);
  }
  return { root, update };
}

// The texts that a run has generated, and its events.

function samplesView() {
  const select = h("select", { onchange: () => show() });
  const list = h("div", { class: "samples" });
  const title = h("h2", null, "Generated text");
  const root = h("div", { class: "view" }, h("section", { class: "panel" }, h("div", { class: "headed" }, title, h("label", null, "Prompt ", select)), list));
  let answer = { samples: [], total: 0 }, asked = "";

  function show() {
    const shown = answer.samples.filter((sample) => select.value === "" || sample.prompt === select.value);
    const steps = [...new Set(shown.map((sample) => sample.step))];
    if (!steps.length) return void fill(list, h("p", { class: "quiet" }, "Nothing was generated. With sample.every and sample.prompts a run writes text as it learns."));
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
    { name: "What", cell: (event) => kindBadge(event.kind), value: (event) => event.kind },
    { name: "In words", class: "words", cell: (event) => event.text, value: (event) => event.text },
  ]);
  const missing = h("div");
  const root = h("div", { class: "view" }, missing, saved, h("section", { class: "panel" }, title, table.element));

  async function update() {
    const run = detailRun();
    if (!run) return;
    const answer = await ask("/api/events", { run: run.id });
    const count = (kind) => answer.kinds[kind] ?? 0;
    const checkpoints = answer.events.filter((event) => event.kind === "checkpoint");
    fill(missing, noticesOf(run));
    fill(saved, h("h2", null, "Checkpoints"), checkpoints.length || known(run.saved)
      ? h("p", null, `The newest is of step ${format.count(run.saved ?? checkpoints[0].step)}. `, checkpoints.length ? `${answer.total > answer.events.length ? `Of the newest ${answer.events.length} events: written` : "Written"} at steps ${checkpoints.map((event) => format.count(event.step)).join(", ")}.` : "")
      : h("p", { class: "quiet" }, "There is no checkpoint yet."));
    setText(title, `${run.id}: ${plural(answer.total, "event")}, ${plural(count("resume"), "restart")}, ${plural(count("skipped"), "skipped step")}`);
    table.set(answer.events);
  }
  return { root, update };
}

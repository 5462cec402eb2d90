// Orders to a run, if the server accepts them.

/** Buttons for the run whose details are shown, and the run's responses. */
function controls() {
  const buttons = h("p", { class: "buttons" });
  const said = h("p", { class: "quiet", role: "status" });
  const root = h("section", { class: "controls", "aria-label": "Orders", hidden: true }, buttons, said);
  let shown = null;

  async function give(run, path, question) {
    if (question && !confirm(question)) return;
    setText(said, "The run is being told…");
    const told = await ask(path, { run: run.id }, { method: "POST", headers: { "x-kiln-control": "1" } })
      .then((answer) => answer.said, (error) => `not done: ${error.message}`);
    if (shown === run.id) setText(said, sentence(told));
  }

  function update(run) {
    root.hidden = !state.orders || !run || run.is_over;
    if (root.hidden || shown === run.id) return;
    shown = run.id;
    setText(said, "");
    fill(buttons,
      h("button", { type: "button", onclick: () => give(run, "/api/checkpoint") }, "Save a checkpoint"),
      h("button", { type: "button", onclick: () => give(run, "/api/stop", `Save ${run.id}, and end it?`) }, "Save and end"));
  }
  return { root, update };
}

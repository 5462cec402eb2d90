// Memory of every rank over the phases of the last step.

/** Ranks that get a style of their own. */
const MOST_RANKS = 32;
const MILLISECONDS = { units: [[1, " ms"]] };

function memoryView() {
  const note = h("p", { class: "quiet" });
  const area = h("div", { class: "plot", tabindex: "0", role: "img" });
  const told = h("p", { class: "told", role: "status" }, "Point at the chart to read it.");
  const peak = new Chart({ title: "Peak memory over the run", format: format.bytes, note: "The largest memory of any rank." });
  const title = h("h2", null, "Memory over a step");
  const table = new Table("Peaks of the step by rank", [
    { name: "Rank", isNumber: true, cell: (r) => r.rank, value: (r) => r.rank },
    { name: "Machine", cell: (r) => r.node, value: (r) => r.node },
    { name: "At the start", isNumber: true, downFirst: true, cell: (r) => format.bytes(r.first), value: (r) => r.first },
    { name: "Peak", isNumber: true, downFirst: true, cell: (r) => format.bytes(r.peak), value: (r) => r.peak },
    { name: "Reached in", cell: (r) => r.where, value: (r) => r.where },
    { name: "After", isNumber: true, cell: (r) => format.microseconds(r.when), value: (r) => r.when },
  ], { sorted: 3, isDown: true });
  const legend = h("ul", { class: "legend" });
  const step = h("section", { class: "panel" }, title, phaseLegend(), legend, area, told);
  const list = h("section", { class: "panel" }, table.element);
  const root = h("div", { class: "view" }, note, step, list, h("section", null, peak.element));
  let plot = null, shape = "", phases = [];

  /** Stretches of the step in which the first rank was in one activity. */
  function phasesOf(rank, names) {
    const found = [];
    for (const [activity, , start, end] of rank.spans) {
      const name = names[activity], last = found[found.length - 1];
      if (last && last.name === name) last.end = end;
      else found.push({ name, start, end });
    }
    return found;
  }

  function shade(u) {
    const { ctx, bbox } = u;
    ctx.save();
    for (const { name, start, end } of phases) {
      const left = Math.max(bbox.left, u.valToPos(start / 1000, "x", true)), right = Math.min(bbox.left + bbox.width, u.valToPos(end / 1000, "x", true));
      ctx.fillStyle = `${color(activityColor(name))}22`;
      ctx.fillRect(left, bbox.top, Math.max(0, right - left), bbox.height);
    }
    ctx.restore();
  }

  function draw(data) {
    // More lines than styles are all grey, but for the one with the highest peak, which is above the others.
    const top = data.ranks.reduce((best, rank) => (rank.peak > best.peak ? rank : best)), isMany = data.ranks.length > MOST_RANKS;
    const ranks = isMany ? [...data.ranks.filter((rank) => rank !== top), top] : data.ranks;
    phases = phasesOf(ranks[0], data.names);
    const tables = ranks.map((rank) => {
      const xs = [], ys = [];
      for (const span of rank.spans) {
        const x = span[3] / 1000;
        if (x > (xs[xs.length - 1] ?? -1)) { xs.push(x); ys.push(span[4]); }
      }
      return [xs, ys];
    });
    const joined = uPlot.join(tables), now = [ranks.map(({ rank }) => rank), theme()].join();
    if (plot && now === shape) return void plot.setData(joined);
    shape = now;
    plot?.destroy();
    fill(area);
    const looks = ranks.map((rank, i) => (!isMany ? styleOf(i) : rank === top ? styleOf(1) : { color: `${color("--ink")}40`, dash: [], key: "key" }));
    const entry = (look, text) => h("li", null, keyOf(look), text);
    fill(legend, !isMany ? ranks.map((rank, i) => entry(looks[i], `Rank ${rank.rank}`)) : [entry(styleOf(1), `Rank ${top.rank}, the highest peak`), entry({ color: color("--muted"), key: "key" }, `${ranks.length - 1} other ranks`)]);
    const lines = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const written = (write) => (_, marks, index, space, step) => labels(marks, step, write);
    plot = new uPlot({
      width: Math.max(200, area.clientWidth), height: 300, legend: { show: false }, cursor: { drag: { x: false, y: false }, points: { show: false } },
      scales: { x: { time: false }, y: { range: (_, low, high) => padded(low, high) } },
      series: [{}, ...ranks.map((rank, i) => ({ stroke: looks[i].color, dash: looks[i].dash, width: isMany && rank !== top ? 1 : 1.75, points: { show: false } }))],
      axes: [{ ...lines, values: written(MILLISECONDS), incrs: ROUND, space: 70, size: 34 }, { ...lines, values: written(format.bytes), size: 76, incrs: BYTE_MARKS }],
      hooks: { drawClear: [shade], setCursor: [(u) => tell(u, ranks)] },
    }, joined, area);
  }

  function tell(u, ranks) {
    const index = u.cursor.idx;
    if (index === null || index === undefined) return;
    const held = ranks.map((rank, i) => {
      let at = index;
      while (at >= 0 && (u.data[i + 1][at] === undefined || u.data[i + 1][at] === null)) at -= 1;
      return [rank.rank, at >= 0 ? u.data[i + 1][at] : null];
    }).filter(([, bytes]) => bytes !== null).sort((a, b) => b[1] - a[1]);
    if (!held.length) return;
    const time = u.data[0][index] * 1000, phase = phases.find(({ start, end }) => start <= time && time <= end)?.name ?? "";
    const [most, least] = [held[0], held[held.length - 1]];
    setText(told, `After ${format.microseconds(time)}, in ${phase}: rank ${most[0]} uses the most, ${format.bytes(most[1])}; rank ${least[0]} least, ${format.bytes(least[1])}.`);
  }

  const resized = new ResizeObserver(() => { if (plot && area.clientWidth) plot.setSize({ width: area.clientWidth, height: 300 }); });
  resized.observe(area);

  async function update() {
    const run = detailRun();
    if (!run) return;
    const [answer, own] = await Promise.all([ask("/api/timeline", { run: run.id }), seriesOf(run, { key: "peak_bytes", points: 400 })]);
    peak.set([{ name: run.id, ...lookOf(run.id), data: own.series.peak_bytes }], { theme: theme() });
    const counted = answer.ranks.filter((rank) => rank.spans.some((span) => span[4] > 0));
    step.hidden = list.hidden = counted.length === 0;
    setText(note, answer.problem ? `${run.id} has no timeline: ${answer.problem}.` : counted.length ? sentence(answer.note) : "The ranks of this run do not measure their memory.");
    if (!counted.length) return;
    setText(title, `${run.id}: memory over step ${format.count(answer.step)}, ${plural(counted.length, "rank")}`);
    for (const rank of counted) {
      const top = rank.spans.reduce((best, span) => (span[4] > best[4] ? span : best));
      Object.assign(rank, { first: rank.spans[0][4], peak: top[4], when: top[3] - rank.start,
        where: answer.names[top[0]] + (top[1] >= 0 ? ` of ${answer.names[top[1]]}` : "") });
    }
    table.set(counted);
    const highest = counted.reduce((best, rank) => (rank.peak > best.peak ? rank : best));
    area.setAttribute("aria-label", `Memory of ${plural(counted.length, "rank")} over a step. Rank ${highest.rank} uses the most, ${format.bytes(highest.peak)}, in ${highest.where}. A table follows.`);
    draw({ ...answer, ranks: counted });
  }
  return { root, update, remove: () => { resized.disconnect(); plot?.destroy(); peak.remove(); } };
}

function phaseLegend() {
  const entry = (name, key) => h("li", null, h("span", { class: "key square pale", style: { "--key": `var(${key})` } }), name);
  return h("ul", { class: "legend" }, entry("Data", "--data"), entry("Forward", "--forward"), entry("Backward", "--backward"), entry("Optimizer", "--optimizer"), entry("Other", "--other"));
}

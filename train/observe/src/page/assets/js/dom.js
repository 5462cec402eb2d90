// Creates elements in one expression. Text is always set as text: data of a run is never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element with properties, listeners (`onclick`), `class`, `data-*` and `aria-*`, and children. */
function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, part] of Object.entries(value)) element.style.setProperty(key, part);
    else if (name in element && !name.includes("-") && name !== "list") element[name] = value;
    else element.setAttribute(name === "class" ? "class" : name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
}

/** Replaces the children of an element. */
function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** Sets a text only if it differs: screen readers announce changes. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A long name that may break after its dots, such as the key of a metric. Numbers stay whole. */
const breakable = (name) => name.split(/(?<=\.)(?!\d)/).flatMap((part, i) => (i ? [h("wbr"), part] : [part]));

/** A small line chart of `values`, hidden from screen readers. */
function sparkline(values, color) {
  const numbers = values.filter((value) => value !== null && Number.isFinite(value));
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 120 32");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "spark");
  svg.setAttribute("aria-hidden", "true");
  if (numbers.length > 1) {
    const low = Math.min(...numbers), high = Math.max(...numbers), span = high - low || 1;
    const points = numbers.map((value, i) =>
      `${((i / (numbers.length - 1)) * 120).toFixed(1)},${(29 - ((value - low) / span) * 26).toFixed(1)}`);
    const line = document.createElementNS(SVG, "polyline");
    line.setAttribute("points", points.join(" "));
    line.setAttribute("stroke", color);
    svg.append(line);
  }
  return svg;
}

/** The value of a colour in the style sheet, such as `--line`. */
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Debounces `run`: calls it once further calls have paused. */
function debounced(run, pause = 150) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => run(...values), pause);
  };
}

/** The data of a report, which uses no server. */
const report = JSON.parse(document.getElementById("report")?.textContent ?? "null");

/** The user's choices, stored by the browser. It may refuse, and stores none for a report. */
const memory = {
  get(key, otherwise) {
    if (report) return otherwise;
    try {
      const text = localStorage.getItem(`kiln.${key}`);
      return text === null ? otherwise : JSON.parse(text);
    } catch {
      return otherwise;
    }
  },
  set(key, value) {
    if (report) return;
    try {
      localStorage.setItem(`kiln.${key}`, JSON.stringify(value));
    } catch {
      // Nothing is stored then.
    }
  },
};

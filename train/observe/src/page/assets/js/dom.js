// Elements, made in one expression. Text is always set as text: nothing of a run is read as HTML.

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

/** Puts other children into an element. */
function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** Sets a text only if it is another one: screen readers read what changes. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A small drawing of a line through `values`; for the eye only. */
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

/** A value of a colour of the style sheet, such as `--line`. */
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Calls `run` when the calls of it have paused. */
function debounced(run, pause = 150) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => run(...values), pause);
  };
}

/** The data of a report, which asks no server. */
const report = JSON.parse(document.getElementById("report")?.textContent ?? "null");

/** Choices of the reader that the browser keeps. It may refuse, and keeps none for a report. */
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
      // Nothing is kept then.
    }
  },
};

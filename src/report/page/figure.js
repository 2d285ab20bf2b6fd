// A figure: title, note, controls, the plot, and its values and drawing to take away. Everything of the picture,
// its legend too, is in the one SVG.

const FIGURES = []; // all on the page, for export

// spec: id (also the file name), title, note, alt; controls: elements; draw(svg, width) draws and returns the
// hover targets or nothing; rows(): the values, for CSV.
function addFigure(parent, spec) {
  const title = element("h3");
  const plot = element("div", { class: "plot", role: "img", tabindex: "0" });
  const tip = element("div", { class: "tip", "aria-live": "polite", hidden: "" });
  const svg = d3.create("svg").attr("xmlns", "http://www.w3.org/2000/svg").attr("aria-hidden", "true");
  plot.append(svg.node(), tip);
  const button = (label, what, action) => {
    const made = element("button", { type: "button", "aria-label": `Download ${what}: ${spec.id}` }, label);
    made.addEventListener("click", action);
    return made;
  };
  const figure = element(
    "figure",
    { id: spec.id },
    element(
      "div",
      { class: "head" },
      title,
      element(
        "div",
        { class: "tools" },
        button("SVG", "as SVG", () => download(`${spec.id}.svg`, "image/svg+xml", made.export())),
        button("CSV", "values as CSV", () => download(`${spec.id}.csv`, "text/csv", csv(spec.rows()))),
      ),
    ),
    spec.note ? element("p", { class: "note" }, spec.note) : null,
    spec.controls?.length ? element("div", { class: "controls" }, ...spec.controls) : null,
    plot,
  );
  parent.append(figure);

  const made = {
    id: spec.id,
    redraw(width = plot.clientWidth) {
      if (width <= 0) return;
      title.textContent = text(spec.title);
      plot.setAttribute("aria-label", `${text(spec.title)}. ${text(spec.alt ?? "")} Arrow keys read the values.`);
      svg.selectAll("*").remove();
      svg.attr("width", width);
      hover.show(spec.draw(svg, width) ?? null);
      svg.attr("viewBox", `0 0 ${width} ${svg.attr("height")}`); // paper may be narrower
    },
    // In light colours, with every style written out: the file stands alone.
    export(width) {
      const root = document.documentElement;
      root.dataset.theme = "light";
      if (width) made.redraw(width);
      const copy = standalone(svg.node(), text(spec.title), text(spec.alt ?? ""));
      delete root.dataset.theme;
      if (width) made.redraw();
      return copy;
    },
  };
  const hover = hoverOf(plot, tip, svg);
  made.redraw();
  let width = plot.clientWidth;
  new ResizeObserver(() => {
    if (plot.clientWidth === width) return;
    width = plot.clientWidth;
    made.redraw();
  }).observe(plot);
  FIGURES.push(made);
  return made;
}

const text = (value) => (typeof value === "function" ? value() : value);

// ---- hovering, and the same by arrow keys

// Targets: {x, y, title, lines: [{name, value, colour}]}, x in pixels and rising; `mark(target)` draws the cursor.
function hoverOf(plot, tip, svg) {
  let state = null;
  let at = -1;
  const hide = () => {
    tip.hidden = true;
    at = -1;
    svg.selectAll(".cursor").remove();
  };
  const go = (index) => {
    if (!state?.targets.length) return;
    at = Math.max(0, Math.min(state.targets.length - 1, index));
    const target = state.targets[at];
    tip.replaceChildren(element("b", {}, target.title), ...target.lines.map(tipLine));
    tip.hidden = false;
    svg.selectAll(".cursor").remove();
    state.mark(svg.append("g").attr("class", "cursor"), target);
    const right = plot.clientWidth - tip.offsetWidth; // the farthest that fits
    const beside = target.x + 14 <= right ? target.x + 14 : target.x - tip.offsetWidth - 14;
    tip.style.left = `${Math.max(0, Math.min(right, beside))}px`;
    tip.style.top = `${Math.max(0, Math.min(target.y ?? 30, plot.clientHeight - tip.offsetHeight))}px`;
  };
  plot.addEventListener("pointermove", (event) => {
    if (!state) return;
    const [x, y] = [event.clientX - plot.getBoundingClientRect().left, event.clientY - plot.getBoundingClientRect().top];
    const index = state.nearest(x, y);
    if (index >= 0) go(index);
    else hide();
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: state?.row ?? 1, ArrowUp: -(state?.row ?? 1) }[event.key];
    if (event.key === "Escape") hide();
    else if (step && state) go(at < 0 ? 0 : at + step);
    else return;
    event.preventDefault();
  });
  return {
    show(next) {
      state = next;
      hide();
    },
  };
}

function tipLine({ name, value, colour }) {
  const line = element("span", {}, element("i"), element("em", {}, name), value);
  line.style.setProperty("--key", colour ? `var(${colour})` : "transparent");
  return line;
}

// ---- export

const WRITTEN_OUT = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linejoin",
  "font-family", "font-size", "font-weight", "text-anchor",
];

const EDGE = 12;

function standalone(svg, title, description) {
  const copy = svg.cloneNode(true);
  const from = svg.querySelectorAll("*");
  copy.querySelectorAll("*").forEach((node, i) => {
    const style = getComputedStyle(from[i]);
    const isText = node.tagName === "text" || node.tagName === "tspan";
    for (const name of WRITTEN_OUT) {
      if (!isText && /font|anchor/.test(name)) continue;
      node.setAttribute(name, style.getPropertyValue(name));
    }
    node.removeAttribute("style");
    node.removeAttribute("class");
  });
  copy.querySelectorAll(".cursor").forEach((node) => node.remove());
  const [width, height] = [svg.getAttribute("width"), svg.getAttribute("height")];
  copy.removeAttribute("aria-hidden");
  const make = (name, content, attributes = {}) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    node.textContent = content;
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  // Some air around what fills its figure to the edge.
  const [wide, tall] = [Number(width) + 2 * EDGE, Number(height) + 2 * EDGE];
  copy.setAttribute("width", wide);
  copy.setAttribute("height", tall);
  copy.setAttribute("viewBox", `${-EDGE} ${-EDGE} ${wide} ${tall}`);
  const ground = make("rect", "", { x: -EDGE, y: -EDGE, width: wide, height: tall, fill: "#ffffff" });
  copy.prepend(make("title", title), make("desc", description), ground);
  return new XMLSerializer().serializeToString(copy) + "\n";
}

// ---- controls

function choice(label, options, chosen, onChange) {
  const select = element(
    "select",
    {},
    ...options.map(([value, name]) => element("option", { value, ...(value === chosen ? { selected: "" } : {}) }, name)),
  );
  select.addEventListener("change", () => onChange(select.value));
  return element("label", {}, label, select);
}

// Where the weights go: 32 sets per panel, one per row, their 16 items of largest priority, the largest first. What a
// head should do is one strong column at the left.

function addHeatMap(parent, runs) {
  const mapped = runs.filter((run) => framesOf(run).length > 0);
  if (mapped.length === 0) return;
  const sizesOfRun = mapped.map((run) => framesOf(run).map((frame) => frame.items));
  const common = sizesOfRun.reduce((a, b) => a.filter((items) => b.includes(items)));
  const sizes = common.length ? common : sizesOfRun[0];
  const rules = [...new Set(mapped.flatMap((run) => framesOf(run).flatMap((f) => Object.keys(f.rules))))];
  const rule = ["paper", "target_entropy", ...rules].find((r) => rules.includes(r) && r !== "softmax") ?? rules[0];
  const state = { size: tellingSize(mapped[0], rule, sizes), rule };
  const panels = () =>
    mapped.length === 1
      ? ["softmax", state.rule].map((rule) => panelOf(mapped[0], rule, sizes[state.size], ruleName(rule)))
      : mapped.map((run) => panelOf(run, state.rule, sizes[state.size], run.name));

  const slider = element("input", { type: "range", min: 0, max: sizes.length - 1, step: 1, value: state.size });
  const output = element("output");
  const showSize = () => {
    output.textContent = plural(sizes[state.size], "item");
    slider.setAttribute("aria-valuetext", output.textContent);
  };
  slider.addEventListener("input", () => {
    state.size = Number(slider.value);
    showSize();
    figure.redraw();
  });
  showSize();
  const figure = addFigure(parent, {
    id: "heat-map",
    title: () => heatTitle(panels(), sizes[state.size]),
    note:
      "One row per set, one column per item, the largest at the left: a sharp head is one strong column. " +
      "Weights of the first head of a run.",
    alt: () => panels().map((p) => `${p.name}: the largest item gets ${short(p.first)} on average.`).join(" "),
    controls: [
      element("label", {}, "Size of the sets", slider, output),
      choice(
        mapped.length === 1 ? "Beside softmax" : "Rule",
        rules.filter((rule) => mapped.length > 1 || rule !== "softmax" || rules.length === 1).map((rule) => [rule, ruleName(rule)]),
        state.rule,
        (rule) => {
          state.rule = rule;
          figure.redraw();
        },
      ),
    ],
    draw: (svg, width) => drawHeat(svg, width, panels()),
    rows: () => heatRows(mapped),
  });
}

// The size at which softmax and the rule differ most in what the largest item gets; the last if they hardly do.
function tellingSize(run, rule, sizes) {
  const difference = sizes.map((items) => {
    const [plain, ruled] = ["softmax", rule].map((r) => panelOf(run, r, items, r).first);
    return isNumber(plain) && isNumber(ruled) ? Math.abs(ruled - plain) : -1;
  });
  return d3.max(difference) < 0.01 ? sizes.length - 1 : d3.scan(difference, d3.descending);
}

// Square roots, so that small weights are still seen.
const shade = (weight) => Math.sqrt(Math.min(1, weight));

const framesOf = (run) => run.results.heat_map.frames.filter((f) => Object.keys(f.rules).length > 0);

function panelOf(run, rule, items, name) {
  const frame = framesOf(run).find((f) => f.items === items);
  const weights = own(frame?.rules, rule) ?? [];
  return { name, label: name === ruleName(rule) ? `under ${ruleInSentence(rule)}` : `in ${name}`, weights, first: d3.mean(weights, (row) => row[0]) };
}

function heatTitle(panels, items) {
  const said = panels.filter((p) => isNumber(p.first)).map((p) => `${percent(p.first)}\u00a0% ${p.label}`);
  return `Of ${plural(items, "item")}, the largest gets ${said.join(", ")}`;
}

function heatRows(runs) {
  const rows = [["run", "items", "rule", "set", "item", "weight"]];
  for (const run of runs) {
    for (const frame of framesOf(run)) {
      for (const [rule, sets] of Object.entries(frame.rules)) {
        sets.forEach((row, s) => row.forEach((weight, i) => rows.push([run.name, frame.items, rule, s + 1, i + 1, weight])));
      }
    }
  }
  return rows;
}

function drawHeat(svg, width, panels) {
  const gap = 24;
  const across = Math.max(1, Math.min(panels.length, width < 480 ? 2 : 4));
  const side = Math.min(560, (width - gap * (across - 1)) / across);
  const tall = Math.min(420, Math.max(240, side * 1.1));
  const boxes = panels.map((panel, i) => ({
    panel,
    left: (i % across) * (side + gap),
    top: 22 + Math.floor(i / across) * (tall + 60),
  }));
  boxes.forEach((box) => drawPanel(svg, box, side, tall));
  const bottom = 22 + Math.ceil(panels.length / across) * (tall + 60) - 60;
  drawHeatScale(svg, width, bottom + 34);
  svg.attr("height", bottom + 64);
  return heatTargets(boxes, side, tall);
}

function drawPanel(svg, { panel, left, top }, side, tall) {
  const group = svg.append("g").attr("transform", `translate(${left},${top})`);
  const label = group.append("text").attr("y", -8).attr("font-weight", 600).text(panel.name);
  shorten(label, side);
  group.append("rect").attr("class", "zero").attr("width", side).attr("height", tall);
  const [rows, columns] = [panel.weights.length || 1, d3.max(panel.weights, (row) => row.length) || 1];
  panel.weights.forEach((row, s) => {
    row.forEach((weight, i) => {
      if (!(weight > 0)) return;
      group
        .append("rect")
        .attr("class", "cell")
        .attr("x", (i * side) / columns)
        .attr("y", (s * tall) / rows)
        .attr("width", Math.max(1, side / columns - 0.6))
        .attr("height", Math.max(1, tall / rows - 0.6))
        .attr("fill-opacity", fixed(shade(weight), 3));
    });
  });
  if (panel.weights.length === 0) group.append("text").attr("class", "unit").attr("x", 8).attr("y", 20).text("not in these results");
  if (panel.weights.length === 0) return;
  group.append("text").attr("class", "unit").attr("y", tall + 16).text("largest");
  group.append("text").attr("class", "unit").attr("x", side).attr("y", tall + 16).attr("text-anchor", "end").text(`${columns}th largest`);
}

function drawHeatScale(svg, width, y) {
  const [steps, length] = [25, Math.min(220, width - 90)];
  const group = svg.append("g").attr("transform", `translate(0,${y})`);
  group.append("rect").attr("class", "zero").attr("width", length).attr("height", 10);
  for (let i = 0; i < steps; ++i) {
    group.append("rect").attr("class", "cell").attr("x", (i * length) / steps).attr("width", length / steps + 0.3).attr("height", 10).attr("fill-opacity", (i + 0.5) / steps);
  }
  for (const weight of [0, 0.05, 0.2, 0.5, 1]) {
    const anchor = weight === 0 ? "start" : weight === 1 ? "end" : "middle";
    group.append("text").attr("class", "unit").attr("x", shade(weight) * length).attr("y", 25).attr("text-anchor", anchor).text(short(weight));
  }
  group.append("text").attr("class", "unit").attr("x", length + 8).attr("y", 10).text("weight");
}

function heatTargets(boxes, side, tall) {
  const targets = [];
  for (const { panel, left, top } of boxes) {
    const [rows, columns] = [panel.weights.length, d3.max(panel.weights, (row) => row.length)];
    panel.weights.forEach((row, s) => {
      row.forEach((weight, i) => {
        targets.push({
          x: left + ((i + 1) * side) / columns,
          y: top + (s * tall) / rows,
          box: [left + (i * side) / columns, top + (s * tall) / rows, side / columns, tall / rows],
          title: panel.name,
          lines: [{ name: `set ${s + 1}, ${i === 0 ? "largest item" : `item ${i + 1} from the top`}`, value: fixed(weight, 4) }],
        });
      });
    });
  }
  return {
    targets,
    row: d3.max(boxes, ({ panel }) => d3.max(panel.weights, (row) => row.length)),
    nearest: (x, y) => targets.findIndex(({ box: [l, t, w, h] }) => x >= l && x < l + w && y >= t && y < t + h),
    mark(group, { box: [l, t, w, h] }) {
      group.append("rect").attr("class", "rim").attr("x", l).attr("y", t).attr("width", w).attr("height", h);
    },
  };
}

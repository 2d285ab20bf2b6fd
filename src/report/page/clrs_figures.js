// The figures of results on CLRS-Text: right answers against size, errors by place, entropy by layer, training.

// What a curve shows, in percent; limits that are null are not there.
const MEASURES = {
  exact: { name: "exact matches", unit: "exact matches, % of problems", of: (one) => one.exact },
  tokens: { name: "right tokens", unit: "right tokens, %", of: (one) => one.tokens },
  forced: { name: "right tokens after right ones", unit: "right tokens after right ones, %", of: (one) => ({ mean: one.forced, low: null, high: null }) },
};

// Between whole sizes, an axis has no labels.
const INPUT_SIZE = { label: "size of the input", tick: (size) => (Number.isInteger(size) ? count(size) : "") };

// ---- what is compared: variants as they were trained, or what took the place of one of them at test

function comparisonsIn(clrs) {
  const names = namesOf(clrs);
  const trained = names.filter((name) => name.setting === AS_TRAINED);
  const made = trained.length ? [{ label: "variants as trained", names: trained, name: (name) => name.variant }] : [];
  for (const variant of new Set(names.map((name) => name.variant))) {
    const settings = names.filter((name) => name.variant === variant);
    if (settings.length === 1 && settings[0].setting === AS_TRAINED) continue;
    settings.sort((a, b) => (b.setting === AS_TRAINED) - (a.setting === AS_TRAINED));
    made.push({ label: `runs of ${variant}, settings at test`, names: settings, name: (name) => (name.setting === AS_TRAINED ? `${variant} as trained` : name.setting) });
  }
  return made;
}

const comparisonChoice = (comparisons, onChange) =>
  comparisons.length === 1 ? [] : [choice("Compared", comparisons.map(({ label }, i) => [String(i), label]), "0", (value) => onChange(comparisons[Number(value)]))];

// ---- right answers against size

const BASELINES = [
  ["chance", "another’s answer", "2 3"],
  ["copy", "copy the input", "7 4"],
];

function addSizeCurves(parent, clrs) {
  const comparisons = comparisonsIn(clrs);
  const state = { measure: "exact", compared: comparisons[0] };
  const figures = [];
  const change = (field) => (value) => {
    state[field] = value;
    figures.forEach((figure) => figure.redraw());
  };
  parent.append(
    element(
      "p",
      { class: "note" },
      "Filled dots are trained sizes. Shaded: 95 % intervals over runs, over problems if there is one run. " +
        "Thin dashed lines are what needs no algorithm: the answer of another problem, and the question’s first list.",
    ),
    element(
      "div",
      { class: "controls", id: "clrs-controls" },
      choice("Measure", Object.entries(MEASURES).map(([measure, { name }]) => [measure, name]), "exact", change("measure")),
      ...comparisonChoice(comparisons, change("compared")),
    ),
  );
  const panels = element("div", { class: "pair" });
  parent.append(panels);
  clrs.tasks.forEach((task, i) => figures.push(addSizePanel(clrs.tasks.length > 1 ? panels : parent, task, i, state)));
}

function sizePoints(task, name, measure) {
  return task.sizes
    .map((size) => ({ size, one: entryOf(size, name) }))
    .filter(({ one }) => one)
    .map(({ size, one }) => {
      const { mean, low, high } = MEASURES[measure].of(one);
      return { x: size.size, y: 100 * mean, low: scaled(low), high: scaled(high), solid: isTrained(task, size.size) };
    });
}

const comparedCurves = ({ names, name: nameOf }, pointsOf) =>
  names.map((name, i) => ({ name: nameOf(name), points: pointsOf(name), look: { ...look(i), symbol: null }, of: name })).filter((s) => s.points.length > 0);

function sizeBaselines(task, measure) {
  if (measure === "forced") return [];
  return BASELINES.map(([field, name, dash]) => ({
    name,
    points: task.sizes.map((size) => ({ x: size.size, y: 100 * size[field][measure] })),
    look: { colour: "--ink", dash, symbol: null },
    thin: true,
    dashed: true,
  }));
}

function addSizePanel(parent, task, index, state) {
  const curves = () => comparedCurves(state.compared, (name) => sizePoints(task, name, state.measure)).map((s) => ({ ...s, band: true, solid: true }));
  return addLines(parent, {
    id: `clrs-size-${index + 1}`,
    title: () => {
      const first = curves()[0];
      if (!first) return `${taskName(task)}: not measured`;
      const [from, to] = ends(first.points);
      const said = (p) => `${percentage(p.y)}\u00a0% at size ${count(p.x)}`;
      const what = `${taskName(task)}: ${MEASURES[state.measure].name} of ${first.name}`;
      if (from === to) return `${what} are ${said(from)}`;
      if (from.y === to.y) return `${what} are ${said(from)} and at size ${count(to.x)}`;
      return `${what} ${to.y < from.y ? "fall" : "grow"} from ${said(from)} to ${said(to)}`;
    },
    alt: "One curve per variant against the size of the input, with intervals, and two baselines.",
    x: { ...INPUT_SIZE, title: (size) => `size ${count(size)}${isTrained(task, size) ? ", trained" : ""}` },
    y: {
      get label() {
        return MEASURES[state.measure].unit;
      },
      domain: () => [0, 100],
      format: percentage,
      value: (p) => percentage(p.y) + (isNumber(p.low) && isNumber(p.high) ? ` (${percentage(p.low)} … ${percentage(p.high)})` : ""),
    },
    series: () => [...sizeBaselines(task, state.measure), ...curves()],
    legend: (series) => [...series.filter((s) => !s.dashed), ...series.filter((s) => s.dashed)],
    rows: () => sizeRows(task),
  });
}

function sizeRows(task) {
  const bounds = ["exact", "tokens"].flatMap((measure) => [measure, `${measure} low`, `${measure} high`]);
  return [
    ["algorithm", "size", "trained", "problems", "variant", "setting", "runs", ...bounds, "forced"],
    ...task.sizes.flatMap((size) => {
      const start = [task.algorithm, size.size, isTrained(task, size.size), size.problems];
      const baseline = ([field, name]) => [...start, name, "", "", size[field].exact, "", "", size[field].tokens, "", "", ""];
      const estimate = ({ mean, low, high }) => [mean, low, high];
      return [
        ...size.variants.map((one) => [...start, one.variant, one.setting, one.runs, ...estimate(one.exact), ...estimate(one.tokens), one.forced]),
        ...BASELINES.map(baseline),
      ];
    }),
  ];
}

// ---- errors by place in the answer

function addPlaces(parent, clrs) {
  const comparisons = comparisonsIn(clrs);
  const state = { task: clrs.tasks[0], compared: comparisons[0], size: 0 };
  const output = element("output");
  const slider = element("input", { type: "range", min: 0, step: 1 });
  const sizeNow = () => state.task.sizes[state.size];
  const showSize = () => {
    output.textContent = count(sizeNow().size) + (isTrained(state.task, sizeNow().size) ? ", trained" : "");
    slider.setAttribute("aria-valuetext", output.textContent);
  };
  // The first size beyond the trained ones, where answers begin to go wrong.
  const start = (task) => {
    const most = d3.max(task.trained_sizes);
    const beyond = task.sizes.findIndex((size) => size.size > most);
    Object.assign(state, { task, size: beyond >= 0 ? beyond : task.sizes.length - 1 });
    slider.max = task.sizes.length - 1;
    slider.value = state.size;
    showSize();
  };
  slider.addEventListener("input", () => {
    state.size = Number(slider.value);
    showSize();
    figure.redraw();
  });
  start(state.task);
  const curves = () => comparedCurves(state.compared, (name) => placePoints(sizeNow(), name));
  const figure = addLines(parent, {
    id: "clrs-places",
    title: () => placesTitle(state.task, sizeNow(), curves()[0]),
    note: "Of greedy answers, compared with the right one token by token; answers of any length are cut into at most 64 equal parts.",
    alt: "One curve of wrong tokens per variant, from the beginning to the end of the answer.",
    controls: [
      ...taskChoice(clrs, (task) => {
        start(task);
        figure.redraw();
      }),
      element("label", {}, "Size", slider, output),
      ...comparisonChoice(comparisons, (compared) => {
        state.compared = compared;
        figure.redraw();
      }),
    ],
    x: { label: "place in the answer, %", domain: () => [0, 100], title: (place) => `at ${fixed(place, 0)} % of the answer` },
    y: { label: "wrong tokens, %", domain: () => [0, 100], format: percentage },
    series: curves,
    rows: () => [
      ["algorithm", "size", "variant", "setting", "place in the answer, %", "wrong tokens, share"],
      ...state.task.sizes.flatMap((size) =>
        size.variants.flatMap((one) => one.errors.map((share, i) => [state.task.algorithm, size.size, one.variant, one.setting, (100 * (i + 0.5)) / one.errors.length, share])),
      ),
    ],
  });
}

function placePoints(size, name) {
  const errors = entryOf(size, name)?.errors ?? [];
  return errors.map((share, i) => ({ x: (100 * (i + 0.5)) / errors.length, y: 100 * share }));
}

function placesTitle(task, size, first) {
  const where = `${taskName(task)}, size ${count(size.size)}`;
  if (!first) return `${where}: not measured`;
  const half = Math.ceil(first.points.length / 2);
  const mean = (some) => `${percentage(d3.mean(some, (p) => p.y))}\u00a0%`;
  if (first.points.length === 1) return `${where}: ${first.name} has ${mean(first.points)} of tokens wrong`;
  return `${where}: ${first.name} has ${mean(first.points.slice(0, half))} of tokens wrong in the first half of the answer, ${mean(first.points.slice(-half))} in the second`;
}

// ---- entropy by layer

function addLayerEntropies(parent, clrs) {
  const names = namesOf(clrs).filter((name) => clrs.tasks.some((task) => entropyPoints(task, name, "entropy", 0).length > 0));
  if (names.length === 0) return;
  const state = { task: clrs.tasks[0], name: names[0] };
  const layers = () => d3.max(state.task.sizes, (size) => entryOf(size, state.name)?.entropy?.length ?? 0);
  // The line after rule or normalizer only where it isn't the one before.
  const curves = () =>
    d3.range(layers()).flatMap((layer) => {
      const { colour } = look(layer);
      const [plain, sharp] = ["entropy", "sharp_entropy"].map((field) => entropyPoints(state.task, state.name, field, layer));
      const same = sharp.every((p, i) => p.y === plain[i]?.y);
      return [
        { name: `layer ${layer}`, points: plain, look: { colour, dash: null, symbol: null } },
        ...(same ? [] : [{ name: `layer ${layer}, sharpened`, points: sharp, look: { colour, dash: "6 4", symbol: null }, unlisted: true }]),
      ];
    });
  const figure = addLines(parent, {
    id: "clrs-entropy",
    title: () => entropyTitle(state, layers()),
    note: "Mean over heads and over the rows that answer. Solid: at β = 1; dashed: with the rule or normalizer, where that differs.",
    alt: "One curve of entropy per layer against the size of the input.",
    controls: [
      ...taskChoice(clrs, (task) => {
        state.task = task;
        figure.redraw();
      }),
      choice("Runs", names.map((name, i) => [String(i), fullName(name)]), "0", (value) => {
        state.name = names[Number(value)];
        figure.redraw();
      }),
    ],
    x: { ...INPUT_SIZE, title: (size) => `size ${count(size)}${isTrained(state.task, size) ? ", trained" : ""}` },
    y: { label: "entropy, nats", domain: ([, high]) => [0, Math.max(high, 0.1)] },
    series: curves,
    legend: (series) => {
      const dashed = series.some((s) => s.unlisted) ? [{ name: "sharpened", look: { colour: "--soft", dash: "6 4", symbol: null } }] : [];
      return [...series.filter((s) => !s.unlisted), ...dashed];
    },
    rows: () => [
      ["algorithm", "size", "variant", "setting", "layer", "entropy, nats", "sharpened, nats"],
      ...clrs.tasks.flatMap((task) =>
        task.sizes.flatMap((size) =>
          size.variants.flatMap((one) => (one.entropy ?? []).map((h, layer) => [task.algorithm, size.size, one.variant, one.setting, layer, h, one.sharp_entropy?.[layer]])),
        ),
      ),
    ],
  });
}

function entropyPoints(task, name, field, layer) {
  return task.sizes
    .map((size) => ({ x: size.size, y: entryOf(size, name)?.[field]?.[layer] }))
    .filter((p) => isNumber(p.y));
}

function entropyTitle({ task, name }, layers) {
  const means = (field) =>
    task.sizes
      .map((size) => ({ x: size.size, values: d3.range(layers).map((layer) => entryOf(size, name)?.[field]?.[layer]).filter(isNumber) }))
      .filter(({ values }) => values.length > 0)
      .map(({ x, values }) => ({ x, y: d3.mean(values) }));
  const plain = means("entropy");
  if (plain.length === 0) return `Entropy of ${fullName(name)} on ${taskName(task)}: not measured`;
  const [from, to] = ends(plain);
  const sharp = lastOf(means("sharp_entropy"));
  const sharpened = sharp && sharp.x === to.x && sharp.y !== to.y ? `, sharpened to ${short(sharp.y)}\u00a0nats` : "";
  const said = (p) => `${short(p.y)}\u00a0nats at size ${count(p.x)}`;
  const what = `${taskName(task)}: mean entropy of ${fullName(name)}`;
  return from === to ? `${what} is ${said(from)}${sharpened}` : `${what} ${to.y < from.y ? "falls" : "grows"} from ${said(from)} to ${said(to)}${sharpened}`;
}

// ---- training

const MOST_STEPS = 400; // points of a curve

function addClrsTraining(parent, clrs) {
  const variants = [...new Set(clrs.runs.map((run) => run.variant))];
  const curvesOf = (field) => {
    const listed = new Set();
    return clrs.runs.flatMap((run) => {
      const every = Math.ceil(run.metrics.length / MOST_STEPS);
      const known = run.metrics.filter((line) => isNumber(line[field]));
      const points = known.filter((_, i) => i % every === 0 || i === known.length - 1).map((line) => ({ x: line[0], y: line[field] }));
      if (points.length === 0) return [];
      const unlisted = listed.has(run.variant);
      listed.add(run.variant);
      return [{ name: run.name, variant: run.variant, points, look: { ...look(variants.indexOf(run.variant)), dash: null, symbol: null }, thin: true, unlisted }];
    });
  };
  if (curvesOf(1).length === 0) return;
  const pair = element("div", { class: "pair" });
  parent.append(pair);
  const one = (id, field, y, title) =>
    addLines(pair, {
      id,
      title,
      alt: "One curve per run, coloured by its variant, against steps of training.",
      x: { label: "steps", title: (step) => `step ${count(step)}` },
      y,
      series: () => curvesOf(field),
      legend: (series) => series.filter((s) => !s.unlisted).map((s) => ({ ...s, name: s.variant })),
      rows: () => [
        ["run", "variant", "seed", "step", field === 1 ? "loss, nats" : "accuracy of tokens, share"],
        ...clrs.runs.flatMap((run) => run.metrics.map((line) => [run.name, run.variant, run.seed, line[0], line[field]])),
      ],
    });
  const end = (field) => d3.mean(curvesOf(field), (s) => lastOf(s.points).y);
  one(
    "clrs-loss",
    1,
    { label: "loss, nats per token of the answer", log: true, format: short },
    `Loss of ${plural(curvesOf(1).length, "run")} while training: ${short(end(1))} at the end`,
  );
  one(
    "clrs-accuracy",
    2,
    { label: "right tokens after right ones, share", domain: ([low]) => [Math.min(low, 0.9), 1], format: (y) => fixed(y, 3) },
    `Right tokens while training: ${percent(end(2))}\u00a0% at the end`,
  );
}

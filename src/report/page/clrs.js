// CLRS-Text: decoders with and without a rule, at sizes they never saw.

function drawClrs({ runs: [run] }) {
  const clrs = run.results;
  header(`CLRS-Text, ${run.name}`, ...clrsHeadline(clrs));
  addSizeCurves(section("Right answers against size"), clrs);
  addDifferences(section("Differences from softmax"), clrs);
  addPlaces(section("Errors by place in the answer"), clrs);
  addLayerEntropies(section("Entropy of attention"), clrs);
  addClrsTraining(section("Training"), clrs);
  addClrsOrigin(section("How it was made"), clrs);
  document.querySelectorAll("section").forEach((made) => {
    if (made.childElementCount === 1) made.remove(); // results without it
  });
}

const AS_TRAINED = "as trained";
const isTrained = (task, size) => task.trained_sizes.includes(size);
const taskName = (task) => task.algorithm + (task.hints ? " with hints" : "");
const sameAs = (name) => (one) => one.variant === name.variant && one.setting === name.setting;
const isPlain = sameAs({ variant: "softmax", setting: AS_TRAINED });
const entryOf = (size, name) => size.variants.find(sameAs(name));
const fullName = ({ variant, setting }) => (setting === AS_TRAINED ? variant : `${variant}, ${setting} at test`);

// Every variant and setting that some size has, in the order of the file.
function namesOf(clrs) {
  const seen = new Map();
  for (const task of clrs.tasks) {
    for (const size of task.sizes) {
      for (const { variant, setting } of size.variants) seen.set(JSON.stringify([variant, setting]), { variant, setting });
    }
  }
  return [...seen.values()];
}

// ---- the headline

// What is compared with softmax as trained: other variants as they were trained, else settings at test, at sizes that
// were not trained.
function comparedAt(clrs, asTrained) {
  return clrs.tasks.flatMap((task) =>
    task.sizes
      .filter((size) => !isTrained(task, size.size))
      .flatMap((size) =>
        size.variants
          .filter((one) => !isPlain(one) && (one.setting === AS_TRAINED) === asTrained && isNumber(one.against_softmax?.exact.difference))
          .map((one) => ({ task, size, one, plain: size.variants.find(isPlain) }))
          .filter(({ plain }) => plain),
      ),
  );
}

function clrsHeadline(clrs) {
  const asTrained = comparedAt(clrs, true);
  const found = asTrained.length ? asTrained : comparedAt(clrs, false);
  if (found.length === 0) return aloneHeadline(clrs);
  const of = (measure) => (entry) => entry.one.against_softmax[measure].difference;
  const largest = (measure) => found[d3.scan(found, (a, b) => Math.abs(of(measure)(b)) - Math.abs(of(measure)(a)))];
  const measure = Math.abs(of("exact")(largest("exact"))) >= 0.0005 ? "exact" : "tokens";
  const { task, size, one, plain } = largest(measure);
  const test = one.against_softmax[measure];
  const sure = found.filter((entry) => isNumber(entry.one.against_softmax[measure].p) && entry.one.against_softmax[measure].p < 0.05);
  const better = sure.filter((entry) => of(measure)(entry) > 0).length;
  const what = measure === "exact" ? "of problems exactly" : "of tokens";
  const among =
    found.length === 1
      ? "The only comparison with softmax at a size that was not trained."
      : `The largest of ${count(found.length)} differences from softmax at sizes that were not trained. With p below 0.05, ${better} ` +
        `${better === 1 ? "is" : "are"} in favour of the other variant and ${sure.length - better} of softmax.`;
  return [
    [
      `At size ${count(size.size)} of ${taskName(task)}, not among the trained ones, ${fullName(one)} answers ` +
        `${percent(one[measure].mean)}\u00a0% ${what}, softmax ${percent(plain[measure].mean)}\u00a0%: `,
      element("strong", {}, `${points(test.difference)} points`),
      isNumber(test.p) ? `, p = ${pValue(test.p)}` : "",
    ],
    `${among} ${one.runs === 1 && isNumber(test.p) ? "Of a single run p is over its problems and says nothing of other seeds. " : ""}` +
      clrsExtent(clrs),
  ];
}

function aloneHeadline(clrs) {
  const task = clrs.tasks[0];
  const size = task.sizes[task.sizes.length - 1];
  const one = size.variants[0];
  return [
    [`At size ${count(size.size)} of ${taskName(task)}, ${fullName(one)} answers `, element("strong", {}, `${percent(one.exact.mean)}\u00a0%`), " of problems exactly"],
    `These results hold nothing to compare with softmax. ${clrsExtent(clrs)}`,
  ];
}

function clrsExtent(clrs) {
  const sizes = clrs.tasks.flatMap((task) => task.sizes.map((size) => size.size));
  return `${plural(clrs.runs.length, "run")}, ${plural(clrs.tasks.length, "algorithm")}, sizes ${count(d3.min(sizes))} to ${count(d3.max(sizes))}.`;
}

// ---- controls that several figures have

const taskChoice = (clrs, onChange) =>
  clrs.tasks.length === 1 ? [] : [choice("Algorithm", clrs.tasks.map((task, i) => [String(i), taskName(task)]), "0", (value) => onChange(clrs.tasks[Number(value)]))];

// ---- differences

const SHOWN_SIZES = 14;

// At most so many, the first and the last among them.
function spreadOver(list, most) {
  return list.length <= most ? list : d3.range(most).map((i) => list[Math.floor((i * (list.length - 1)) / (most - 1))]);
}

function addDifferences(parent, clrs) {
  const names = namesOf(clrs).filter((name) => !isPlain(name));
  const compared = names.filter((name) => clrs.tasks.some((task) => task.sizes.some((size) => entryOf(size, name)?.against_softmax)));
  if (compared.length === 0) return;
  compared.sort((a, b) => (b.setting === AS_TRAINED) - (a.setting === AS_TRAINED));
  const state = { task: clrs.tasks[0], name: compared[0] };
  const shown = element("div");
  const show = () => shown.replaceChildren(...differencesOf(state.task, state.name));
  parent.append(
    element(
      "p",
      { class: "note" },
      "Paired with softmax as trained, of the same seeds on the same problems; 95 % intervals and p of the t-test over runs, " +
        "over problems if there is one run. Marked: p below 0.05, as one in twenty tests is by chance. ● is a trained size.",
    ),
    element(
      "div",
      { class: "controls" },
      ...taskChoice(clrs, (task) => {
        state.task = task;
        show();
      }),
      choice("Against softmax", compared.map((name, i) => [String(i), fullName(name)]), "0", (value) => {
        state.name = compared[Number(value)];
        show();
      }),
    ),
    shown,
  );
  show();
}

function differencesOf(task, name) {
  const rows = task.sizes.map((size) => ({ size, one: entryOf(size, name), plain: size.variants.find(isPlain) })).filter(({ one }) => one);
  if (rows.length === 0) return [element("p", {}, `${capital(fullName(name))} was not measured on ${taskName(task)}.`)];
  const some = spreadOver(rows, SHOWN_SIZES);
  const made = sizeTable(`${taskName(task)}: ${fullName(name)} against softmax`, task, some);
  if (some.length === rows.length) return [made];
  return [made, element("details", {}, element("summary", {}, `All ${plural(rows.length, "size")}`), sizeTable("Every size", task, rows))];
}

function sizeTable(caption, task, rows) {
  return table(
    caption,
    [
      ["", "", "", { text: "exact matches, %", span: 5, class: "group" }, { text: "right tokens, %", span: 5, class: "group" }],
      ["size", "problems", "runs", ...["exact", "tokens"].flatMap(() => ["softmax", "here", "difference", "95 % interval", "p"])],
    ],
    rows.map(({ size, one, plain }) => [
      `${isTrained(task, size.size) ? "● " : ""}${count(size.size)}`,
      count(size.problems),
      count(one.runs),
      ...["exact", "tokens"].flatMap((measure) => {
        const test = one.against_softmax?.[measure];
        const sure = isNumber(test?.p) && test.p < 0.05;
        return [
          plain ? percent(plain[measure].mean) : "–",
          percent(one[measure].mean),
          { text: points(test?.difference), class: sure ? "differs" : "" },
          interval(test),
          pValue(test?.p),
        ];
      }),
    ]),
  );
}

// ---- provenance

const lastOf = (list) => list[list.length - 1];
const shownValue = (value) => (value !== null && typeof value === "object" ? JSON.stringify(value) : String(value));

function addClrsOrigin(parent, clrs) {
  const group = (title, content) => element("div", {}, element("h4", {}, title), content);
  const recipes = clrs.runs.map((run) => run.recipe);
  const options = [...new Set(recipes.flatMap(Object.keys))];
  const common = options.filter((option) => recipes.every((recipe) => shownValue(own(recipe, option)) === shownValue(own(recipes[0], option))));
  const differing = options.filter((option) => !common.includes(option) && option !== "seed" && option !== "variant");
  const spans = ({ sizes, trained_sizes: trained }) =>
    `trained at ${trained.join(", ")}; evaluated at ${plural(sizes.length, "size")} from ${count(sizes[0].size)} to ${count(lastOf(sizes).size)}, ` +
    `${plural(sizes[0].problems, "problem")} each`;
  parent.append(
    element(
      "div",
      { class: "facts" },
      group("Run", facts(clrs.provenance)),
      group("Algorithms", facts(Object.fromEntries(clrs.tasks.map((task) => [taskName(task), spans(task)])))),
      group("Recipe, where all runs agree", facts(Object.fromEntries(common.map((option) => [option, own(recipes[0], option)])))),
    ),
    element(
      "details",
      {},
      element("summary", {}, `Every run (${count(clrs.runs.length)})`),
      table(
        "Runs, with the loss and accuracy at the end of their training",
        [
          ...["run", "variant"].map((text) => ({ text, class: "text" })),
          ...["seed", "steps", "parameters", "loss, nats", "tokens, %"],
          ...(differing.length ? [{ text: "other options", class: "text" }] : []),
        ],
        clrs.runs.map((run) => [
          { text: run.name, class: "text", "data-run": run.name },
          { text: run.variant, class: "text" },
          String(run.seed),
          count(run.step),
          count(run.parameters),
          short(lastOf(run.metrics)?.[1]),
          percent(lastOf(run.metrics)?.[2]),
          ...(differing.length ? [{ text: differing.map((option) => `${option} ${shownValue(own(run.recipe, option) ?? "–")}`).join(", "), class: "text" }] : []),
        ]),
      ),
    ),
  );
}

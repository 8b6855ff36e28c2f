// All LSPs in one page: #lsp-17 is one of them, #q=bank the list of those that are found. What data.js holds is said in
// text_pages.py and vector_pages.py. Text of the corpus and names of images go through textContent only.
"use strict";
(() => {
  const data = LSPS, { facts, lsps, texts } = data, ofText = data.kind === "text";
  const PAGE = 100, MOST_WORDS = 10;

  // -- what data.js holds

  // Whole numbers of a packed string (pages.py): the last digit of each is below the backslash, those before it above.
  function unpack(packed) {
    const numbers = [];
    for (let i = 0, high = 0; i < packed.length; i++) {
      const code = packed.charCodeAt(i);
      if (code > 92) {
        high = 34 * high + code - 93;
      } else {
        numbers.push(57 * high + code - 35);
        high = 0;
      }
    }
    return numbers;
  }

  // The records of a packed string. make(next, list) makes one: next() is a number, list(make) as many as a number says.
  function read(packed, make) {
    const numbers = unpack(packed), found = [];
    let at = 0;
    const next = () => numbers[at++];
    const list = (each) => Array.from({ length: next() }, () => each());
    while (at < numbers.length) found.push(make(next, list));
    return found;
  }

  function remember(make) {
    let made;
    return () => made ??= make();
  }

  const coFiring = (lsp) => read(lsps.co_firing[lsp], (next) => ({ lsp: next(), npmi: next() / 100, support: next() }));
  const nearest = (lsp) => read(lsps.nearest[lsp], (next) => ({ lsp: next(), cosine: next() / 100 - 1 }));
  const tenths = (lsp, each) => read(lsps.tenths[lsp], (next, list) => ({ least: next(), largest: next(), samples: list(() => each(next)) }));
  const density = (lsp) => lsps.tokens[lsp] / Math.max(1, facts.coded);

  // -- elements

  function element(name, className, ...content) {
    const made = document.createElement(name);
    if (className) made.className = className;
    made.append(...content); // strings become text
    return made;
  }

  const give = (made, properties) => Object.assign(made, properties);

  function style(made, values) {
    for (const [name, value] of Object.entries(values)) made.style.setProperty(name, value);
    return made;
  }

  const many = (number) => number.toLocaleString("en");
  const thousandths = (number) => (number / 1000).toFixed(3);
  const percent = (share, digits) => `${(100 * share).toFixed(digits)} %`;
  const linkTo = (lsp, ...content) => give(element("a", "", ...content), { href: `#lsp-${lsp}` });
  const note = (...content) => element("p", "note", ...content);
  const section = (title, ...content) => element("section", "", element("h2", "", title), ...content);

  function searchForm(placeholder) {
    const label = ofText ? "Search by word, LSP number or label" : "Search by LSP number";
    const input = give(element("input"), { type: "search", name: "q", autocomplete: "off", placeholder, ariaLabel: label });
    const form = element("form", "", input);
    form.setAttribute("role", "search");
    return { form, input };
  }

  // -- a store: the text around tokens

  // Tokens of all contexts in the order of the store, and the runs of them that follow one another in a window.
  const passages = remember(() => {
    const runs = [], tokens = unpack(data.passages);
    let start = 0, window = 0;
    read(data.runs, (next) => {
      const size = next(), end = start + (size >> 1);
      const text = size % 2 ? runs.at(-1).text : { first: start };
      text.last = end;
      runs.push({ start, window: window += next(), position: next(), text });
      start = end;
    });
    return { tokens, runs };
  });

  function runOf(token) {
    const { runs } = passages();
    let low = 0, high = runs.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (runs[middle].start <= token) low = middle; else high = middle;
    }
    return runs[low];
  }

  // The text around a token, in which tokens with a weight are marked.
  function passage(token, weights, heaviest) {
    const { tokens } = passages(), { text, start, window, position } = runOf(token), found = give(element("p"), { dir: "auto" });
    const first = Math.max(token - data.reach, text.first), last = Math.min(token + data.reach + 1, text.last);
    for (let place = first; place < last; place++) {
      const piece = texts[tokens[place]], word = piece.replace(/^ /, ""), weight = weights.get(place);
      if (word !== piece && place > first) found.append(" "); // the mark is on the token, not on the space before it
      if (place !== token && weight === undefined) {
        found.append(word);
      } else {
        const mark = element("mark", place === token ? "at" : "", word || "␣");
        if (weight !== undefined) give(style(mark, { "--w": weight / heaviest }), { title: thousandths(weight) });
        found.append(mark);
      }
    }
    found.normalize();
    return { text: found, place: `${window}:${position + token - start}` };
  }

  // Where contexts have an LSP: tokens of the passages, and their weights in thousandths.
  function marksOf(lsp) {
    const tokens = [], weights = new Map();
    let token = 0;
    read(lsps.marks[lsp], (next) => {
      tokens.push(token += next());
      weights.set(token, next());
    });
    return { tokens, weights };
  }

  const typical = remember(() => lsps.typical.map((packed) => read(packed, (next) => [texts[next()], next()])));
  const nameOf = (lsp) => typical()[lsp].slice(0, data.name_words).map(([word]) => word).join(" · ");
  const isolated = (word) => element("bdi", "", word || "␣"); // so that a word written from right to left moves nothing beside it
  const named = (lsp) => typical()[lsp].slice(0, data.name_words).flatMap(([word], place) => [...(place ? [" · "] : []), isolated(word)]);
  const labelOf = (lsp) => data.labels ? data.labels[lsp] : "";
  const words = remember(() => read(data.words, (next, list) => ({ word: texts[next()], count: next(), lsps: list(() => [next(), next()]) })));

  // -- vectors: patches of images, or rows

  const [rows, columns] = facts.grid || [1, 1];

  // A vector of which data.js has the row of the file and the weight.
  function vector(next) {
    const row = next(), weight = next(), image = Math.floor(row / (rows * columns)), cell = row % (rows * columns);
    return { row, weight, image, cell };
  }

  const imageOf = (image) => give(element("img"), { loading: "lazy", alt: data.images[image], src: `pictures/${image}.jpg` });
  const caption = (image, weight) => [element("span", "name", data.images[image]), element("span", "weight", thousandths(weight))];

  function patch({ image, cell, weight }) {
    const row = Math.floor(cell / columns), column = cell % columns;
    const shown = style(imageOf(image), { width: `${100 * columns}%`, height: `${100 * rows}%`, left: `${-100 * column}%`, top: `${-100 * row}%` });
    return give(element("span", "patch", shown), { title: `${data.images[image]} · row ${row}, column ${column} · ${thousandths(weight)}` });
  }

  // An image with its patches that have the LSP; `at` is the one beside it.
  function picture(image, patches, heaviest, at) {
    const tints = patches.map(([cell, weight]) => style(element("i", cell === at ? "at" : ""), {
      "--r": Math.floor(cell / columns), "--c": cell % columns, "--w": Math.min(1, weight / heaviest),
    }));
    return style(element("span", "picture", imageOf(image), ...tints), { "--rows": rows, "--columns": columns });
  }

  const rowChips = (vectors) => element("ul", "chips", ...vectors.map(({ row, weight }) =>
    element("li", "", `row ${many(row)} `, element("small", "", thousandths(weight)))));
  const vectorsOf = (packed) => read(packed, vector);

  // -- the page of an LSP

  function showLsp(lsp) {
    const { form, input } = searchForm("Search");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      location.hash = address(input.value);
    });
    const steps = element("span");
    if (lsp > 0) steps.append(give(linkTo(lsp - 1, `← ${lsp - 1}`), { rel: "prev" }));
    if (lsp < facts.k - 1) steps.append(give(linkTo(lsp + 1, `${lsp + 1} →`), { rel: "next" }));
    const all = give(element("a", "", "All LSPs"), { href: "#" });
    const head = element("header", "", element("nav", "", all, steps, form), element("h1", "", `LSP ${lsp}`));
    document.title = `LSP ${lsp}`;
    if (ofText && nameOf(lsp)) {
      document.title += ` · ${nameOf(lsp)}`;
      head.append(element("p", "lead", ...named(lsp)));
    }
    if (ofText && labelOf(lsp)) head.append(element("p", "label", labelOf(lsp)));
    single.replaceChildren(head, element("main", "", ...(ofText ? textSections(lsp) : vectorSections(lsp))));
  }

  const figure = (title, value, ...notes) => element("div", "", element("dt", "", title), element("dd", "", value), element("dd", "note", ...notes));

  function commonFigures(lsp) {
    const of = `${many(lsps.tokens[lsp])} of ${many(facts.coded)} ${ofText ? "tokens" : "vectors"}`;
    return [figure("Density", percent(density(lsp), 2), of), figure("Mean weight", lsps.weight[lsp].toFixed(3), "where it occurs")];
  }

  function related(lsp) {
    const list = (others, value) => element("ul", "related", ...others.map((other) => {
      const name = ofText ? [" ", element("span", "name", ...named(other.lsp))] : [];
      return element("li", "", linkTo(other.lsp, element("b", "", String(other.lsp)), ...name), " ", element("span", "figure", value(other)));
    }));
    const firing = coFiring(lsp), near = nearest(lsp), pair = element("div", "pair");
    pair.append(firing.length
      ? section("Fires together with", list(firing, ({ npmi, support }) => `${npmi.toFixed(2)} · ${many(support)}`),
        note(`normalised pointwise mutual information; in how many of ${many(data.counted)} ${ofText ? "tokens" : "vectors"}`))
      : section("Fires together with", note("No other LSP occurs with it often enough.")));
    if (near.length) pair.append(section("Nearest atoms", list(near, ({ cosine }) => cosine.toFixed(2)), note("cosine")));
    return pair;
  }

  // An LSP whose weights are all equal has no tenths, and is heaviest nowhere.
  const headOfHeaviest = (lsp) => lsps.tenths[lsp] ? "Where it is heaviest"
    : `All its weights are equal. Some of its ${ofText ? "tokens" : "vectors"}, at random`;

  const ofTenths = (lsp, each, show) => lsps.tenths[lsp] ? [section("From every tenth of its weights",
    ...tenths(lsp, each).flatMap(({ least, largest, samples }) =>
      [element("h3", "", `${thousandths(least)} to ${thousandths(largest)}`), show(samples)]))] : [];

  const nothing = (of) => element("p", "", `None of the ${many(facts.coded)} ${of} that were read has this LSP.`);

  function textSections(lsp) {
    if (!lsps.tokens[lsp]) return [nothing("tokens"), ...senses(lsp), related(lsp)];
    const { tokens, weights } = marksOf(lsp), top = unpack(lsps.top[lsp]);
    const heaviest = Math.max(...top.map((place) => weights.get(tokens[place])), 1);
    const contexts = (places) => element("ol", "contexts", ...places.map((place) => {
      const token = tokens[place], found = passage(token, weights, heaviest);
      const weight = give(element("span", "weight", thousandths(weights.get(token))), { title: "weight" });
      return element("li", "", weight, found.text, give(element("span", "place", found.place), { title: "window and token in the training split" }));
    }));
    return [
      figures(lsp),
      ...senses(lsp),
      section(headOfHeaviest(lsp), contexts(top)),
      ...edits(lsp, tokens),
      related(lsp),
      ...ofTenths(lsp, (next) => next(), contexts),
    ];
  }

  function figures(lsp) {
    const bars = unpack(lsps.profile[lsp]).map((height) => style(element("span"), { "--h": height / 100 }));
    const profile = give(element("span", "profile", ...bars), { ariaLabel: "mean weight from the first positions of the window to the last" });
    profile.setAttribute("role", "img");
    const positional = lsps.positional[lsp] ? [": ", element("b", "positional", "positional")] : [];
    const typicalWords = typical()[lsp].flatMap(([word, share]) =>
      [element("span", "", isolated(word), " ", element("small", "", percent(share / 1000, 1))), " "]);
    const broad = element("div", "broad", element("dt", "", "Typical words"), element("dd", "words", ...typicalWords),
      element("dd", "note", "share of its mass"));
    return element("dl", "figures", ...commonFigures(lsp),
      figure("Clarity", lsps.clarity[lsp].toFixed(3), "how much its words say together"),
      figure("Information", lsps.information[lsp].toFixed(4), "nats per token by the word"),
      figure("Over the window", profile, `${lsps.nats[lsp].toFixed(3)} nats by the position`, ...positional),
      broad);
  }

  function senses(lsp) {
    const [synsets, files] = data.senses ? data.senses[lsp] : [[], []];
    if (!synsets.length && !files.length) return [];
    const list = element("ul", "senses", ...synsets.map(([lemmas, synset, file, npmi]) => element("li", "",
      element("b", "", lemmas.join(", ")), " ", element("span", "name", `${synset} · ${file}`), " ", element("span", "figure", `NPMI ${npmi.toFixed(2)}`))));
    return [section("Word senses", list, note(`Lexicographer files: ${files.map(([name, share]) => `${name} ${percent(share, 0)}`).join(", ")}`))];
  }

  // The words that a probe predicts with an LSP and without it.
  function edits(lsp, tokens) {
    const found = lsps.edits ? read(lsps.edits[lsp], (next, list) => ({
      token: tokens[next()], probability: next(), words: [0, 1, 2].map(() => list(() => [texts[next()], next(), next()])),
    })) : [];
    if (!found.length) return [];
    const heads = ["As predicted", `Without LSP ${lsp}`, `LSP ${lsp} × ${data.factor}`];
    const table = element("table", "edits", element("thead", "", element("tr", "", ...heads.map((head) => give(element("th", "", head), { scope: "col" })))));
    for (const { token, probability, words } of found) {
      const { text, place } = passage(token, new Map(), 1), said = ` ${place} · the student gives LSP ${lsp} ${thousandths(probability)}`;
      const context = give(element("td", "", ...text.childNodes, element("span", "place", said)), { colSpan: 3, dir: "auto" });
      const columns = words.map((list) => element("td", "", ...list.map(([word, share, own]) =>
        element("span", "", own ? element("b", "", isolated(word)) : isolated(word), " ", element("small", "", percent(share / 1000, 1))))));
      table.append(element("tbody", "", element("tr", "", context), element("tr", "", ...columns)));
    }
    return [section("Words predicted without it", note(
      "The underlined token is masked. The student of the probe ", element("b", "", facts.probe), " predicts its LSPs, and the probe predicts words from " +
      `them: from all, without LSP ${lsp}, and with its probability multiplied by ${data.factor}. The token itself is bold. A leading ` +
      "hyphen marks the rest of a word. If the student gives the LSP little probability, little changes."), table)];
  }

  function vectorSections(lsp) {
    if (!lsps.tokens[lsp]) return [nothing("vectors"), related(lsp)];
    const top = vectorsOf(lsps.top[lsp]), heaviest = Math.max(...top.map(({ weight }) => weight), 1);
    const patches = new Map(read(lsps.patches[lsp], (next, list) => [next(), list(() => [next(), next()])]));
    const images = read(lsps.heaviest[lsp], (next) => [next(), next()]);
    const pictures = (items) => element("ul", "pictures", ...items.map((item) => element("li", "", ...item)));
    const shown = facts.images
      ? [pictures(top.map((one) => [patch(one), picture(one.image, patches.get(one.image), heaviest, one.cell), ...caption(one.image, one.weight)])),
        note("each from a different image if there are enough; next to it the image with all patches that have the LSP, tinted by weight")]
      : [rowChips(top)];
    return [
      element("dl", "figures", ...commonFigures(lsp)),
      section(headOfHeaviest(lsp), ...shown),
      ...(images.length ? [section("Images with most of it",
        pictures(images.map(([image, weight]) => [picture(image, patches.get(image), heaviest), ...caption(image, weight)])),
        note("mean weight over all patches of the image"))] : []),
      related(lsp),
      ...ofTenths(lsp, vector, (samples) => facts.images ? element("p", "patches", ...samples.map(patch)) : rowChips(samples)),
    ];
  }

  // -- the list

  // Of each column: its head, what it is sorted by, whether that rises first, and what a cell holds.
  const densest = Math.max(...lsps.tokens, 1);
  const number = { head: "LSP", value: (lsp) => lsp, rises: true, cell: (lsp) => [linkTo(lsp, String(lsp))], name: "number" };
  const dense = { head: "Density", title: "share of those with a code that have the LSP", value: density, name: "number",
    cell: (lsp) => [percent(density(lsp), 2), style(element("span", "meter"), { "--w": lsps.tokens[lsp] / densest })] };
  const weight = { head: "Weight", title: "mean weight where it occurs", value: (lsp) => lsps.weight[lsp], name: "number", cell: (lsp) => [lsps.weight[lsp].toFixed(3)] };
  const clarity = { head: "Clarity", title: "how easily it is recognised by its words", value: (lsp) => lsps.clarity[lsp], name: "number", cell: (lsp) => [lsps.clarity[lsp].toFixed(3)] };
  const information = { head: "Information", title: "information that the word gives about it, in nats per token, minus what its positions explain", name: "number wide",
    value: (lsp) => lsps.information[lsp], cell: (lsp) => [lsps.information[lsp].toFixed(4)] };
  const typicalColumn = { head: `Typical words${data.labels ? " and senses" : ""}`, value: nameOf, rises: true, cell(lsp) {
    const positional = give(element("span", "positional", " positional"), { title: "its weight depends on the position in the window" });
    return [linkTo(lsp, ...(nameOf(lsp) ? named(lsp) : ["–"])), ...(lsps.positional[lsp] ? [positional] : []),
      ...(labelOf(lsp) ? [element("span", "sense", labelOf(lsp))] : [])];
  } };
  const heaviest = { head: facts.images ? "Heaviest" : "Heaviest, by row", cell(lsp) {
    const vectors = vectorsOf(lsps.listed[lsp]);
    return facts.images ? [give(linkTo(lsp, ...vectors.map(patch)), { className: "patches" })] : [vectors.map(({ row }) => row).join(", ")];
  } };
  const shownColumns = ofText ? [number, clarity, dense, information, { ...weight, name: "number wide" }, typicalColumn] : [number, dense, weight, heaviest];

  const listed = Array.from({ length: facts.k }, (_, lsp) => lsp).filter((lsp) => ofText || lsps.tokens[lsp]);
  let sorted = ofText ? clarity : number, rising = !ofText, limit = PAGE, found = []; // what is listed now

  const { form, input: query } = searchForm(ofText ? "A word, an LSP's number or label" : "An LSP's number");
  const foundWords = give(element("section"), { id: "words", hidden: true, ariaLive: "polite" });
  const count = give(element("p"), { id: "count", ariaLive: "polite" });
  const heads = shownColumns.map((column) => {
    const cell = element("th", column.name?.includes("wide") ? "wide" : "", column.head);
    if (!column.value) return cell;
    const button = give(element("button", "", column.head), { type: "button", title: column.title || "" });
    button.addEventListener("click", () => {
      rising = column === sorted ? !rising : Boolean(column.rises);
      sorted = column;
      find();
    });
    cell.replaceChildren(button);
    return cell;
  });
  const body = element("tbody");
  const table = give(element("table", data.kind, element("thead", "", element("tr", "", ...heads)), body), { id: "lsps" });
  const more = give(element("button", "", "Show more"), { id: "more", type: "button" });
  const list = element("div", "", element("header", "", element("h1", "", "Latent semantic properties"), aboutText(), form),
    element("main", "", foundWords, count, ...(ofText ? [orderNote()] : []), table, more));
  const single = element("article");

  function aboutText() {
    const name = element("b", "", data.name), about = element("p", "facts");
    if (ofText) {
      about.append(`${many(facts.k)} LSPs of layer ${facts.layer} of `, element("b", "", data.teacher), `, λ ${facts.lam}. Read: ` +
        `${many(facts.sampled)} tokens of `, name, `, whose training text has ${many(facts.tokens)}, special ones included.`);
    } else {
      about.append(`${many(facts.k)} LSPs, λ ${facts.lam}. Read: ${many(facts.sampled)} of ${many(facts.of)} vectors of `, name,
        facts.images ? `, patches of ${many(facts.images)} images in a grid of ${rows} × ${columns}.` : ".");
    }
    if (facts.dead) about.append(` ${many(facts.dead)} LSPs do not occur there.`);
    if (ofText && !facts.labelled) about.append(" No word-sense labels: the diagnostic has not run with this dictionary.");
    if (facts.probe) about.append(" Each page shows which words the probe ", element("b", "", facts.probe), " predicts with its LSP and without it.");
    return about;
  }

  function orderNote() {
    return note("The list starts with the LSPs that are easiest to recognise. Clarity is high if several whole words say much about an LSP " +
      "and belong together: the information from its second to twelfth word, times the mean cosine of these words. Single words, pieces of words, " +
      "numbers and punctuation bring none. The column heads sort the list in other ways.");
  }

  function order(found) {
    const sign = rising ? 1 : -1, value = sorted.value;
    return found.sort((a, b) => {
      const x = value(a), y = value(b);
      return sign * (typeof x === "string" ? x.localeCompare(y) : x - y) || a - b;
    });
  }

  // Accents are ignored: some tokenizers remove them.
  const folded = (text) => text.normalize("NFD").replace(/[\u0300-\u036f]/g, "").toLowerCase();

  // An LSP is found by its number, and by the beginnings of all words that its page lists: typical ones, lemmas, the label.
  const searched = remember(() => listed.map((lsp) => {
    if (!ofText) return [];
    const lemmas = data.senses ? data.senses[lsp][0].flatMap(([some]) => some) : [];
    const all = [...typical()[lsp].map(([word]) => word), ...lemmas];
    return [...all.flatMap((text) => [text, ...text.split(/[ _]+/)]), ...labelOf(lsp).split(/[ ,.·]+/)].map(folded);
  }));

  // The rows from a place on to the limit.
  function showRows(from) {
    body.append(...found.slice(from, limit).map((lsp) =>
      element("tr", "", ...shownColumns.map((column) => element("td", column.name || "", ...column.cell(lsp))))));
    more.hidden = found.length <= limit;
  }

  function showLsps(asked) {
    found = order(listed.filter((lsp, place) => !asked || String(lsp) === asked || searched()[place].some((text) => text.startsWith(asked))));
    if (asked) found.sort((a, b) => (String(b) === asked) - (String(a) === asked));
    body.replaceChildren();
    showRows(0);
    const how = ofText ? "number, words or label begin with" : "number is";
    count.textContent = asked ? `${many(found.length)} ${found.length === 1 ? "LSP" : "LSPs"} whose ${how} “${asked}”` : "";
    table.hidden = !found.length;
    shownColumns.forEach((column, place) => {
      column === sorted ? heads[place].setAttribute("aria-sort", rising ? "ascending" : "descending") : heads[place].removeAttribute("aria-sort");
    });
  }

  function chip([lsp, weight]) {
    const made = linkTo(lsp, `${lsp} `, ...named(lsp), " ", element("small", "", (weight / 1000).toFixed(2)));
    return style(made, { "--w": Math.min(1, weight / 500) });
  }

  function showWords(asked) {
    foundWords.hidden = !ofText || !asked || /^\d+$/.test(asked) && !words().some(({ word }) => word === asked);
    if (foundWords.hidden) return;
    const beginning = words().filter(({ word }) => folded(word).startsWith(asked));
    const found = beginning.length ? beginning : words().filter(({ word }) => folded(word).includes(asked));
    found.sort((a, b) => (folded(b.word) === asked) - (folded(a.word) === asked));
    const title = found.length ? "Words" : `No word with “${asked}” among the ${many(words().length)} most frequent`;
    foundWords.replaceChildren(element("h2", "", title), element("ul", "", ...found.slice(0, MOST_WORDS).map(({ word, count, lsps }) =>
      element("li", "", element("b", "", isolated(word)), ` ${many(count)} times`, element("div", "chips", ...lsps.map(chip))))));
  }

  function find() {
    const asked = folded(query.value.trim());
    showWords(asked);
    showLsps(asked);
  }

  // -- addresses

  const address = (text) => text.trim() ? `#q=${encodeURIComponent(text.trim())}` : "#";
  const places = new Map(); // how far each address is scrolled, for the way back
  let shown = null, followed = false;

  function show() {
    const hash = location.hash, lsp = Number(/^#lsp-(\d+)$/.exec(hash)?.[1] ?? NaN);
    if (shown === hash) return;
    places.set(shown, scrollY);
    if (lsp < facts.k) {
      showLsp(lsp);
      document.body.replaceChildren(single);
      if (shown !== null) give(single.querySelector("h1"), { tabIndex: -1 }).focus(); // so that it is announced
    } else {
      document.title = `LSPs of ${data.name}`;
      const asked = new URLSearchParams(hash.slice(1)).get("q") ?? "";
      if (asked !== query.value) limit = PAGE;
      query.value = asked;
      find();
      document.body.replaceChildren(list);
      if (shown === null) query.focus();
      else [...list.querySelectorAll("a")].find((link) => link.getAttribute("href") === shown)?.focus();
    }
    scrollTo(0, followed ? 0 : places.get(hash) ?? 0);
    shown = hash;
    followed = false;
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  query.addEventListener("input", () => {
    history.replaceState(null, "", address(query.value));
    shown = location.hash;
    limit = PAGE;
    find();
  });
  more.addEventListener("click", () => {
    const from = limit;
    limit += 4 * PAGE;
    showRows(from);
  });
  document.addEventListener("click", (event) => { followed ||= event.target.closest("a") !== null; });
  history.scrollRestoration = "manual";
  addEventListener("hashchange", show);
  show();
})();

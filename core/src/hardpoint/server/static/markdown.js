/** Markdown as elements: text is always text, so that nothing a model writes becomes markup or a request. */

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE =
  /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*(?!\*)|__(?=\S)([\s\S]*?\S)__(?!\w)|\*(?=[^\s*])([^*]*?[^\s*])\*|(?<!\w)_(?=[^\s_])([^_]*?[^\s_])_(?!\w)|~~(?=\S)([\s\S]*?\S)~~|\[([^\[\]]+)\]\((https?:\/\/[^\s()<>]+|mailto:[^\s()<>]+)\)|(https?:\/\/[^\s<>"'`)\]]*[^\s<>"'`)\].,;:!?])|\\([\\`*_{}[\]()#+\-.!~|>])/;
const DEEPEST = 6;

/** The elements of `text`, in a fragment. `codeButton` makes what stands beside each block of code, given its text. */
export function markdown(text, codeButton) {
  return blocks(text.replace(/\r\n?/g, "\n").split("\n"), codeButton, 0);
}

function element(tag, ...children) {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
}

function blocks(lines, codeButton, depth) {
  const found = document.createDocumentFragment();
  let place = 0;
  const startsBlock = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
  while (place < lines.length) {
    const line = lines[place];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (!line.trim()) {
      place += 1;
    } else if (fence) {
      const end = lines.findIndex((each, index) => index > place && each.trim().startsWith(fence[1]) && !each.trim().slice(fence[1].length).trim());
      const code = lines.slice(place + 1, end < 0 ? lines.length : end).join("\n");
      found.append(codeBlock(code, fence[2], codeButton));
      place = end < 0 ? lines.length : end + 1;
    } else if (heading) {
      found.append(element(`h${Math.min(6, heading[1].length + 2)}`, inline(heading[2])));
      place += 1;
    } else if (RULE.test(line)) {
      found.append(element("hr"));
      place += 1;
    } else if (QUOTE.test(line) && depth < DEEPEST) {
      const quoted = [];
      while (place < lines.length && QUOTE.test(lines[place])) quoted.push(QUOTE.exec(lines[place++])[1]);
      found.append(element("blockquote", blocks(quoted, codeButton, depth + 1)));
    } else if (ITEM.test(line) && depth < DEEPEST) {
      place = list(lines, place, found, codeButton, depth);
    } else if (line.includes("|") && DIVIDER.test(lines[place + 1] ?? "") && lines[place + 1].includes("-")) {
      place = table(lines, place, found);
    } else {
      const paragraph = [line];
      place += 1;
      while (place < lines.length && lines[place].trim() && !startsBlock(lines[place])) paragraph.push(lines[place++]);
      found.append(element("p", inline(paragraph.join("\n"))));
    }
  }
  return found;
}

function codeBlock(code, language, codeButton) {
  const head = element("div", element("span", language || "code"), codeButton(code));
  head.className = "code-head";
  const block = element("div", head, element("pre", element("code", code)));
  block.className = "code";
  return block;
}

/** A list that begins at `place`; returns the line behind it. What is indented below an item belongs to it. */
function list(lines, place, found, codeButton, depth) {
  const [, indent, mark] = ITEM.exec(lines[place]);
  const ordered = /\d/.test(mark);
  const made = element(ordered ? "ol" : "ul");
  if (ordered) made.start = Number.parseInt(mark, 10);
  while (place < lines.length) {
    const item = ITEM.exec(lines[place]);
    if (!item || item[1].length > indent.length + 1 || item[1].length < indent.length || /\d/.test(item[2]) !== ordered) break;
    const body = [item[3]];
    const inner = item[1].length + item[2].length + 1;
    place += 1;
    while (place < lines.length) {
      const line = lines[place];
      const spaces = /^\s*/.exec(line)[0].length;
      const isBlank = !line.trim();
      const next = lines[place + 1] ?? "";
      if (isBlank && !(next.trim() && /^\s*/.exec(next)[0].length > indent.length)) break;
      if (!isBlank && spaces <= indent.length && (ITEM.test(line) || body.at(-1) === "" || HEADING.test(line) || FENCE.test(line))) break;
      body.push(isBlank ? "" : line.slice(Math.min(spaces, inner)));
      place += 1;
    }
    const content = blocks(body, codeButton, depth + 1);
    const [first] = content.children;
    if (first?.tagName === "P" && !content.children[1]?.matches("p")) first.replaceWith(...first.childNodes);
    made.append(element("li", content));
    let after = place; // blank lines between items
    while (after < lines.length && !lines[after].trim()) after += 1;
    if (after > place && ITEM.test(lines[after] ?? "")) place = after;
  }
  found.append(made);
  return place;
}

function table(lines, place, found) {
  const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/).map((each) => each.trim().replace(/\\\|/g, "|"));
  const row = (tag, line) => element("tr", ...cells(line).map((each) => element(tag, inline(each))));
  const head = row("th", lines[place]);
  const body = element("tbody");
  place += 2;
  while (place < lines.length && lines[place].includes("|")) body.append(row("td", lines[place++]));
  const scroll = element("div", element("table", element("thead", head), body));
  scroll.className = "scroll";
  found.append(scroll);
  return place;
}

function inline(text) {
  const found = document.createDocumentFragment();
  let rest = text;
  for (;;) {
    const match = INLINE.exec(rest);
    if (!match) break;
    found.append(rest.slice(0, match.index));
    const [whole, , code, strong, strongToo, em, emToo, struck, label, target, url, escaped] = match;
    if (code !== undefined) found.append(element("code", code.replace(/^ (.*) $/, "$1")));
    else if (strong ?? strongToo) found.append(element("strong", inline(strong ?? strongToo)));
    else if (em ?? emToo) found.append(element("em", inline(em ?? emToo)));
    else if (struck) found.append(element("del", inline(struck)));
    else if (escaped) found.append(escaped);
    else found.append(link(label ?? url, target ?? url));
    rest = rest.slice(match.index + whole.length);
  }
  found.append(rest);
  return found;
}

function link(label, target) {
  const made = element("a", label);
  made.href = target;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  return made;
}

// Markdown to elements. Model text becomes text nodes only; links keep http, https and mailto addresses.

import { copyText, h } from "./dom.js";

// Renders into `root` and keeps the elements of blocks that did not change, so that a stream costs little.
export function renderMarkdown(root, source) {
  const blocks = splitBlocks(source);
  const old = root.blockSources ?? [];
  blocks.forEach((block, i) => {
    const key = block.join("\n");
    if (old[i] === key) return;
    const element = renderBlock(block);
    if (root.children[i]) root.children[i].replaceWith(element);
    else root.append(element);
    old[i] = key;
  });
  while (root.children.length > blocks.length) root.lastChild.remove();
  old.length = blocks.length;
  root.blockSources = old;
}

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const TABLE_LINE = /^\s*\|?[\s:|-]*-[\s:|-]*\|[\s:|-]*$/;

function splitBlocks(source) {
  const blocks = [];
  let block = [];
  let fence = null;
  const flush = () => { if (block.length) blocks.push(block); block = []; };
  for (const line of source.split("\n")) {
    if (fence) {
      block.push(line);
      if (line.trim().startsWith(fence) && !line.trim().slice(fence.length).trim()) { fence = null; flush(); }
      continue;
    }
    const opening = FENCE.exec(line);
    if (opening) { flush(); fence = opening[1]; block.push(line); continue; }
    if (!line.trim()) {
      if (block.length && ITEM.test(block[0])) block.push(line); // a list may go on after an empty line
      else flush();
      continue;
    }
    const inList = block.length && ITEM.test(block[0]);
    if (inList && block.at(-1) === "" && !ITEM.test(line) && !/^\s/.test(line)) flush();
    if (HEADING.test(line) || (RULE.test(line) && !inList)) { flush(); blocks.push([line]); continue; }
    if (inList && startsOtherList(block[0], line)) flush();
    const starts = ITEM.test(line) || line.startsWith(">");
    if (block.length && !inList && starts && !block[0].startsWith(">")) flush();
    block.push(line);
  }
  flush();
  return blocks.map((lines) => { while (lines.length > 1 && !lines.at(-1).trim() && !FENCE.test(lines[0])) lines.pop(); return lines; });
}

// A bullet after numbers, or a number after bullets, at the same depth.
function startsOtherList(first, line) {
  const [a, b] = [ITEM.exec(first), ITEM.exec(line)];
  return a && b && b[1].length <= a[1].length + 1 && /\d/.test(a[2]) !== /\d/.test(b[2]);
}

function renderBlock(lines) {
  const first = lines[0];
  const fence = FENCE.exec(first);
  if (fence) return codeBlock(lines, fence);
  const heading = HEADING.exec(first);
  if (heading) return h("p", { class: `heading h${heading[1].length}`, role: "heading", "aria-level": Math.min(6, heading[1].length + 3) }, inline(heading[2]));
  if (RULE.test(first)) return h("hr");
  if (first.startsWith(">")) {
    const quote = h("blockquote");
    renderMarkdown(quote, lines.map((line) => line.replace(/^>\s?/, "")).join("\n"));
    return quote;
  }
  if (ITEM.test(first)) return list(lines);
  if (lines.length > 1 && first.includes("|") && TABLE_LINE.test(lines[1])) return table(lines);
  return h("p", {}, lines.flatMap((line, i) => [i ? (lines[i - 1].endsWith("  ") ? h("br") : "\n") : "", ...inline(line.trim())]));
}

function codeBlock(lines, fence) {
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence[1]);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const button = h("button", { "aria-label": "Copy code", onclick: () => copyText(text, button) }, "Copy");
  return h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}, fence[2] || "text"), button), h("pre", { tabindex: "0" }, h("code", {}, text)));
}

function list(lines) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const items = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= indent.length + 1) items.push([match[3]]);
    else items.at(-1).push(line.slice(Math.min(indent.length + 2, line.length - line.trimStart().length)));
  }
  const elements = items.map((item) => {
    const inner = item.findIndex((line, i) => i && ITEM.test(line));
    const own = (inner < 0 ? item : item.slice(0, inner)).map((line) => line.trim()).filter(Boolean);
    const entry = h("li", {}, own.flatMap((line, i) => [i ? "\n" : "", ...inline(line)]));
    if (inner >= 0) entry.append(list(item.slice(inner)));
    return entry;
  });
  return ordered ? h("ol", { start: parseInt(mark, 10) }, elements) : h("ul", {}, elements);
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
  const row = (line, tag) => h("tr", {}, cells(line).map((cell) => h(tag, {}, inline(cell))));
  return h("div", { class: "table", tabindex: "0" }, h("table", {}, h("thead", {}, row(lines[0], "th")), h("tbody", {}, lines.slice(2).map((line) => row(line, "td")))));
}

const INLINE = /(`+)([\s\S]+?)\1(?!`)|\*\*([^*\n]+(?:\*[^*\n]+)*)\*\*|__([^_\n]+)__|\*([^\s*][^*\n]*)\*|(?<!\w)_([^\s_][^_\n]*)_(?!\w)|~~([^~\n]+)~~|\[([^\]\n]+)\]\(([^)\s]+)\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])|\\([\\`*_{}[\]()#+\-.!|~>])/;

function inline(text) {
  const out = [];
  for (;;) {
    const match = INLINE.exec(text);
    if (!match) break;
    if (match.index) out.push(text.slice(0, match.index));
    const [whole, , code, strong, strong2, em, em2, gone, label, target, bare, escaped] = match;
    if (code !== undefined) out.push(h("code", {}, code));
    else if (strong ?? strong2) out.push(h("strong", {}, inline(strong ?? strong2)));
    else if (em ?? em2) out.push(h("em", {}, inline(em ?? em2)));
    else if (gone) out.push(h("del", {}, inline(gone)));
    else if (label) out.push(link(target, inline(label), whole));
    else if (bare) out.push(link(bare, [bare], whole));
    else out.push(escaped);
    text = text.slice(match.index + whole.length);
  }
  if (text) out.push(text);
  return out;
}

function link(target, children, whole) {
  return /^(https?:|mailto:)/i.test(target) ? h("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, children) : whole;
}

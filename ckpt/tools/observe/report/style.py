"""Style and script of a report page. Both are constants, into which no data of a run is inserted.

The colours are those of Okabe and Ito, which every kind of colour vision can distinguish, lighter on dark backgrounds.
"""

from __future__ import annotations

import base64
import hashlib

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #fbfbfa; --card: #ffffff; --ink: #1d2329; --soft: #5b6670; --edge: #e1e5e8; --grid: #e9ecee;
  --link: #0a5f97;
  --trained: #2a9d7c; --saving: #e69f00; --recompute: #0072b2; --restore: #56b4e9; --restart: #c77aa5;
  --perceive: #d55e00; --paused: #98a3ad; --other: #c3cbd1;
  --one: #0072b2; --two: #d55e00; --three: #2a9d7c; --four: #c77aa5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14181c; --card: #1c2227; --ink: #e6eaed; --soft: #9aa6b0; --edge: #2d353c; --grid: #2a3137;
    --link: #7cc0f0;
    --trained: #3db592; --saving: #f0b132; --recompute: #4a9fd8; --restore: #8fd0f5; --restart: #da9bbf;
    --perceive: #ee8141; --paused: #7b8791; --other: #56616a;
    --one: #5caee0; --two: #ee8141; --three: #3db592; --four: #da9bbf;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--ground); color: var(--ink); overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif;
}
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 48px; }
header { margin-bottom: 20px; }
h1 { font-size: 15px; font-weight: 600; color: var(--soft); margin: 0 0 2px; letter-spacing: .01em; }
.run { font-size: 25px; line-height: 1.25; font-weight: 650; margin: 0 0 8px; letter-spacing: -.01em; }
h2 { font-size: 18px; margin: 0 0 4px; letter-spacing: -.005em; }
p { margin: 4px 0; }
.soft, .facts { color: var(--soft); }
.facts { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 0; padding: 0; list-style: none; font-size: 14px; }
section, .warn {
  background: var(--card); border: 1px solid var(--edge); border-radius: 10px;
}
section { padding: 18px 20px; margin: 0 0 16px; }
.warn { padding: 12px 16px; margin: 0 0 16px; border-left: 4px solid var(--saving); }
.warn p { margin: 2px 0; }
.plot { display: grid; grid-template-columns: 56px minmax(0, 1fr); column-gap: 8px; margin-top: 8px; }
svg { display: block; overflow: visible; }
svg.area:focus-visible, .scroll:focus-visible, summary:focus-visible {
  outline: 2px solid var(--link); outline-offset: 3px; border-radius: 3px;
}
svg svg { overflow: hidden; }
.tick { font-size: 11.5px; fill: var(--soft); }
.start { text-anchor: start; } .middle { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: var(--grid); } .bar { border-radius: 6px; overflow: hidden; }
.line { fill: none; stroke: var(--one); stroke-width: 1.8; vector-effect: non-scaling-stroke; stroke-linejoin: round; }
.line.two { stroke: var(--two); } .line.three { stroke: var(--three); } .line.four { stroke: var(--four); }
.dot { stroke: var(--card); stroke-width: 1; }
.rule { stroke-width: 1.2; } .hit { stroke: transparent; stroke-width: 9; pointer-events: stroke; }
.rule.fault { stroke: var(--perceive); } .rule.asked { stroke: var(--saving); stroke-dasharray: 4 2; }
.rule.begin { stroke: var(--paused); stroke-dasharray: 1 3; }
.cell { stroke: var(--card); stroke-width: 1; } .plot rect { shape-rendering: crispEdges; }
[data-tip].lit { stroke: var(--ink); stroke-width: 2; }
.trained { fill: var(--trained); } .saving { fill: var(--saving); } .recompute { fill: var(--recompute); }
.restore { fill: var(--restore); } .restart { fill: var(--restart); } .perceive { fill: var(--perceive); }
.paused { fill: var(--paused); } .other { fill: var(--other); }
.one { fill: var(--one); } .two { fill: var(--two); } .three { fill: var(--three); }
.four { fill: var(--four); } .line.one, .line.two, .line.three, .line.four { fill: none; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 0; margin: 8px 0 4px; }
.legend li { display: flex; align-items: center; gap: 6px; font-size: 13px; color: var(--soft); min-width: 0; }
.legend svg { flex: none; }
.scroll { overflow-x: auto; margin-top: 8px; }
th { overflow-wrap: normal; }
.when td:first-child { white-space: nowrap; }
.scroll:not(.when) td:first-child { min-width: 8em; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 12.5px; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--edge); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td { min-width: 6em; max-width: 34em; white-space: pre-line; overflow-wrap: anywhere; } td.n { min-width: 3em; }
.n { text-align: right; white-space: nowrap; }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--link); font-size: 13.5px; width: fit-content; }
.halves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); gap: 16px; }
.halves > section { margin: 0; } .halves { margin: 0 0 16px; }
#tip {
  position: fixed; z-index: 9; pointer-events: none; max-width: min(360px, 92vw); padding: 7px 11px; border-radius: 7px;
  background: var(--ink); color: var(--ground); font-size: 13px; line-height: 1.4; white-space: pre-line;
  box-shadow: 0 3px 14px rgba(0, 0, 0, .25);
}
#tip[hidden] { display: none; }
footer { color: var(--soft); font-size: 13px; margin-top: 20px; }
@media (max-width: 640px) {
  main { padding: 18px 12px 32px; } section { padding: 14px; } .run { font-size: 20px; } .wide { display: none; }
  .parts .n:last-child { display: none; } .parts th, .parts td { padding-right: 8px; }
}
@media print {
  :root { --ground: #fff; --soft: #444; } body { font-size: 12px; } main { max-width: none; padding: 0; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  section { break-inside: avoid; } .long { break-inside: auto; }
  table { font-size: 9.5px; } th { font-size: 9px; } td { min-width: 5.6em; padding-right: 7px; }
  td.n { min-width: 0; }
  #tip { display: none; } .scroll { overflow: visible; } details:not([open]) { display: none; }
}
"""

SCRIPT = """
"use strict";
(function () {
  var box = document.getElementById("tip"), lit = null;
  function hide() {
    box.hidden = true;
    if (lit) { lit.classList.remove("lit"); lit = null; }
  }
  function show(mark, x, y) {
    if (lit !== mark) {
      hide();
      lit = mark;
      lit.classList.add("lit");
      box.textContent = mark.getAttribute("data-tip");
      box.hidden = false;
    }
    var size = box.getBoundingClientRect(), room = 14;
    var left = Math.min(x + room, window.innerWidth - size.width - 6);
    var top = y + room + size.height > window.innerHeight ? y - room - size.height : y + room;
    box.style.left = Math.max(6, left) + "px";
    box.style.top = Math.max(6, top) + "px";
  }
  function pointed(event) {
    var mark = event.target.closest && event.target.closest("[data-tip]");
    if (mark) { show(mark, event.clientX, event.clientY); } else { hide(); }
  }
  document.addEventListener("pointermove", pointed);
  document.addEventListener("pointerdown", pointed);
  document.addEventListener("scroll", hide, true);
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", function (event) {
    var step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") { hide(); }
    var picture = document.activeElement;
    if (!step || !picture || !picture.classList.contains("area")) { return; }
    var marks = Array.prototype.slice.call(picture.querySelectorAll("[data-tip]"));
    if (!marks.length) { return; }
    event.preventDefault();
    var at = lit ? marks.indexOf(lit) : -1;
    var next = marks[at < 0 ? (step > 0 ? 0 : marks.length - 1) : (at + step + marks.length) % marks.length];
    var place = next.getBoundingClientRect();
    show(next, place.left + place.width / 2, place.top + Math.min(place.height, 60) / 2);
  });
})();
"""


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; script-src {_digest(SCRIPT)}; style-src {_digest(STYLE)}; base-uri 'none'; form-action 'none'"
)
"""A content security policy: the page loads nothing, and allows only this style and this script."""


def whole(title: str, body: str) -> str:
    """Return a complete HTML page. `title` and `body`: escaped HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f'<div id="tip" role="status" aria-live="polite" hidden></div>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'
    )

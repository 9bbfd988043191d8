"""Looks and small scripts of the dashboard's page. Everything is in the page itself: it asks for nothing elsewhere."""

from __future__ import annotations

from trine.views.dash_script import SCRIPT

CSS = """
:root { --ground:#f4f5f7; --card:#ffffff; --ink:#1d2127; --soft:#555d68; --line:#d9dde3; --accent:#0b5cad;
  --bad:#a32a00; --badground:#fdeee7; --good:#00663f; --noteground:#eef4fb; color-scheme:light; }
:root[data-theme=dark] { --ground:#12151a; --card:#1b1f26; --ink:#e8eaed; --soft:#aab2bd; --line:#363c46;
  --accent:#7cc0ff; --bad:#ffa07a; --badground:#3a2218; --good:#6fdcae; --noteground:#1c2836; color-scheme:dark; }
* { box-sizing:border-box; }
body { margin:0; background:var(--ground); color:var(--ink);
  font:15px/1.45 system-ui,'Segoe UI','DejaVu Sans',sans-serif; }
a { color:var(--accent); }
:focus-visible { outline:3px solid var(--accent); outline-offset:2px; border-radius:3px; }
:root input[type=range]:focus-visible { outline:3px solid var(--accent) !important; outline-offset:2px; }
.skip { position:absolute; left:-999px; top:0; background:var(--card); padding:8px 12px; z-index:99; }
.skip:focus { left:8px; }
header { display:flex; flex-wrap:wrap; gap:6px 22px; align-items:center; padding:8px 20px; background:var(--card);
  border-bottom:1px solid var(--line); }
header .brand { font-weight:700; font-size:17px; letter-spacing:.01em; }
nav { display:flex; flex-wrap:wrap; gap:2px; }
nav a { padding:6px 12px; text-decoration:none; color:var(--soft); border-bottom:3px solid transparent; }
nav a[aria-current=page] { color:var(--ink); border-color:var(--accent); font-weight:600; }
.right { margin-left:auto; display:flex; gap:12px; align-items:center; }
button { font:inherit; color:var(--ink); background:var(--card); border:1px solid var(--soft); border-radius:6px;
  padding:5px 11px; cursor:pointer; }
.live { color:var(--soft); font-size:13px; }
.live.lost { color:var(--bad); background:var(--badground); font-weight:650; padding:4px 9px; border-radius:5px; }
.controls { position:sticky; top:0; z-index:20; display:flex; flex-wrap:wrap; gap:8px 18px; align-items:flex-end;
  padding:9px 20px; background:var(--card); border-bottom:1px solid var(--line); overflow-x:clip; }
.control { min-width:120px; } .control.run { width:220px; } .control.layer { width:130px; }
.control > label, .control legend, .control .label { display:block; font-size:12px; color:var(--soft); padding:0;
  margin-bottom:3px; }
fieldset.control { border:0; margin:0; padding:0; }
.control.step { flex:1 1 260px; min-width:220px; }
.steprow { display:flex; gap:8px; align-items:center; }
.steprow input[type=range] { flex:1; min-width:90px; width:100%; accent-color:var(--accent); height:30px; padding:0;
  margin:0; border:0; background:transparent; }
.steprow .dash-input-container, .steprow > div:first-child { flex:1; border:0; background:transparent; }
.stepvalue { font-variant-numeric:tabular-nums; min-width:92px; font-size:14px; }
.choices { display:flex; gap:12px; min-height:32px; align-items:center; font-size:14px; }
.choices label { display:inline-flex; gap:5px; align-items:center; color:var(--ink); }
.choices input { accent-color:var(--accent); margin:0; width:16px; height:16px; }
main { padding:14px 20px 40px; max-width:1680px; margin:0 auto; }
h1 { font-size:20px; margin:2px 0 10px; } h2 { font-size:15px; margin:0; font-weight:600; }
.notes p { margin:0 0 8px; padding:7px 12px; background:var(--noteground); border-left:4px solid var(--accent);
  border-radius:0 5px 5px 0; font-size:14px; overflow-wrap:anywhere; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(142px,1fr)); gap:10px; margin-bottom:12px; }
.tile { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:8px 12px; }
.tile dt { font-size:12px; color:var(--soft); } .tile dd { margin:0; }
.tile .value { font-size:21px; font-weight:650; font-variant-numeric:tabular-nums; line-height:1.25; }
.tile .beside { font-size:12px; color:var(--soft); }
.tile.bad { border-color:var(--bad); background:var(--badground); } .tile.bad .value { color:var(--bad); }
.tile.bad .value::before { content:'\\25B2\\00A0'; font-size:13px; vertical-align:2px; }
.sides { display:grid; grid-template-columns:1fr; gap:16px; }
.figures { display:grid; grid-template-columns:repeat(2,minmax(0,1fr)); gap:12px; }
.figure { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:10px 12px 8px; margin:0;
  min-width:0; }
.figure.wide, .figure.pair { grid-column:1/-1; }
.pairrow { display:grid; grid-template-columns:repeat(2,minmax(0,1fr)); gap:14px; }
.figurehead { display:flex; flex-wrap:wrap; gap:2px 12px; justify-content:space-between; align-items:baseline; }
.who { font-size:13px; color:var(--soft); overflow-wrap:anywhere; margin:2px 0 0; font-weight:600; }
.save { font-size:12px; white-space:nowrap; } .save a { padding:3px 5px; }
figcaption { font-size:12.5px; color:var(--soft); overflow-wrap:anywhere; }
figcaption p { margin:2px 0 0; }
.alerts { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:10px 12px; margin-top:12px; }
.tablebox { overflow:auto; max-height:330px; margin-top:6px; }
table { border-collapse:collapse; width:100%; font-size:13.5px; }
th, td { text-align:left; padding:4px 10px 4px 0; border-bottom:1px solid var(--line); vertical-align:top;
  overflow-wrap:anywhere; }
th { color:var(--soft); font-weight:600; position:sticky; top:0; background:var(--card); }
td.number { font-variant-numeric:tabular-nums; white-space:nowrap; }
table.alertlist td:nth-child(-n+3), th { white-space:nowrap; overflow-wrap:normal; }
header:has(nav a[aria-current=page]:not([href='/'])) ~ .controls .balance-only { display:none; }
header:has(nav a[aria-current=page]:not([href='/'],[href='/gates'])) ~ .controls .with-layers { display:none; }
.on { color:var(--bad); font-weight:650; } .off { color:var(--good); }
.js-plotly-plot image, .js-plotly-plot .imagelayer image { image-rendering:pixelated; }
.modebar { display:none !important; }
.drawing { position:relative; }
.cursor { position:absolute; width:0; border-left:1.5px solid #8a93a0; pointer-events:none; }
.cell { position:absolute; z-index:5; max-width:320px; padding:4px 8px; font-size:12.5px; pointer-events:none;
  background:var(--card); border:1px solid var(--soft); border-radius:5px; }
.cursor[hidden], .cell[hidden] { display:none; }
.unseen { position:absolute; width:1px; height:1px; overflow:hidden; clip-path:inset(50%); }
footer { color:var(--soft); font-size:12.5px; padding:0 20px 24px; max-width:1680px; margin:0 auto; }
@media (max-width:860px) {
  .figures, .pairrow { grid-template-columns:minmax(0,1fr); }
  header, .controls, main { padding-left:10px; padding-right:10px; }
  .controls { position:static; } .control.run { width:100%; } .right { margin-left:0; }
  table.alertlist, .alertlist tbody, .alertlist tr, .alertlist td { display:block; }
  .alertlist thead { position:absolute; width:1px; height:1px; overflow:hidden; clip-path:inset(50%); }
  .alertlist tr { border-bottom:1px solid var(--line); padding:4px 0; }
  .alertlist td { display:inline-block; border:0; padding:1px 10px 1px 0; vertical-align:baseline; }
  .alertlist td:last-child { display:block; }
  .control.step { flex-basis:100%; } .tiles { grid-template-columns:repeat(2,minmax(0,1fr)); }
}
@media (prefers-reduced-motion:reduce) { * { transition:none !important; animation:none !important; } }
"""

# Dash's own widgets take their colours from these.
CSS += """
:root { --Dash-Fill-Interactive-Strong:var(--accent); --Dash-Fill-Inverse-Strong:var(--card);
  --Dash-Text-Primary:var(--ink); --Dash-Text-Strong:var(--ink); --Dash-Text-Weak:var(--soft);
  --Dash-Text-Disabled:var(--soft); --Dash-Stroke-Strong:var(--soft); --Dash-Stroke-Weak:var(--line);
  --Dash-Fill-Primary-Hover:var(--noteground); --Dash-Fill-Primary-Active:var(--noteground);
  --Dash-Fill-Weak:var(--ground); --Dash-Fill-Disabled:var(--line); --Dash-Shading-Strong:rgba(0,0,0,.3);
  --Dash-Shading-Weak:rgba(0,0,0,.15); }
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta name="viewport" content="width=device-width, initial-scale=1">
{%metas%}
<title>{%title%}</title>
{%favicon%}
{%css%}
<style>__CSS__</style>
<script>
(function() {
  // Dash puts the caret back into every input it changes; one that is a slider has none, and says so as an error.
  const select = HTMLInputElement.prototype.setSelectionRange;
  HTMLInputElement.prototype.setSelectionRange = function(...at) {
    if (this.type !== 'range') { select.apply(this, at); }
  };
  const kept = document.cookie.match(/trine_theme=(dark|light)/);
  const theme = kept ? kept[1] : matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light';
  document.documentElement.dataset.theme = theme;
  document.cookie = 'trine_theme=' + theme + '; SameSite=Strict; path=/';
})();
__SCRIPT__
</script>
<script async src="/_dash-component-suites/plotly/package_data/plotly.min.js"></script>
</head>
<body>
<a class="skip" href="#main">Skip to the figures</a>
{%app_entry%}
<noscript>This page needs JavaScript; trine balance analyze prints the same figures in a terminal.</noscript>
<footer>Trine dashboard. It only reads, and loads nothing from elsewhere.</footer>
{%config%}
{%scripts%}
{%renderer%}
</body>
</html>
""".replace("__CSS__", CSS).replace("__SCRIPT__", SCRIPT)

"""Looks and small scripts of the dashboard's page. Everything is in the page itself: it asks for nothing elsewhere."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent
CSS = (_HERE / "dash.css").read_text(encoding="utf-8")
SCRIPT = (_HERE / "dash.js").read_text(encoding="utf-8")
THEME = """
function(clicks, now) {
  const theme = now === 'dark' ? 'light' : 'dark';
  document.documentElement.dataset.theme = theme;
  document.cookie = 'trine_theme=' + theme + '; SameSite=Strict; path=/';
  return [theme, theme === 'dark' ? 'Light' : 'Dark'];
}
"""
"""Light or dark: as the system says, until the button is pressed."""

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

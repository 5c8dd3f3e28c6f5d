// The theme of the page that shows these pages in a frame: Airflow names it in a class of its document, and remembers it.

const THEMES = ["light", "dark"];

function outerDocument() {
  try {
    return parent === window ? null : parent.document.documentElement; // of another origin: not readable
  } catch {
    return null;
  }
}

function remembered() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

const outer = outerDocument();

function follow() {
  const theme = outer ? THEMES.find((name) => outer.classList.contains(name)) : remembered();
  if (THEMES.includes(theme)) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

if (outer) new MutationObserver(follow).observe(outer, { attributes: true, attributeFilter: ["class"] });
else addEventListener("storage", follow);
follow();

// The card on Airflow's home page: jobs that need attention, of all connections that the user may read. React is Airflow's own.

const React = globalThis.React;
const h = React.createElement;
const EVERY_MS = 30000;
const ROOT = new URL(".", import.meta.url);

const COLOURS = { UNHEALTHY: "--chakra-colors-fg-error", FAILED: "--chakra-colors-fg-error", DEGRADED: "--chakra-colors-fg-warning" };

function Row({ job }) {
  const colour = `var(${COLOURS[job.verdict ?? job.state] ?? "--chakra-colors-fg-warning"})`;
  return h(
    "li",
    { style: { padding: "6px 0", borderTop: "1px solid var(--chakra-colors-border)" } },
    h("a", { href: job.link, style: { fontWeight: 600, textDecoration: "underline" } }, job.name),
    " ",
    h("span", { style: { color: colour, fontWeight: 600 } }, (job.verdict ?? job.state).toLowerCase()),
    h("div", { style: { fontSize: "0.85em", color: "var(--chakra-colors-fg-muted)", overflowWrap: "anywhere" } }, job.reasons.join("; ")),
  );
}

function JobsInTrouble() {
  const [found, setFound] = React.useState(null);
  React.useEffect(() => {
    let ended = false;
    async function look() {
      if (document.hidden) return;
      try {
        const response = await fetch(new URL("trouble", ROOT), { credentials: "same-origin", headers: { Accept: "application/json" } });
        const answer = response.ok ? await response.json() : { jobs: [], unread: [`The answer was ${response.status}.`], looked_at: 0 };
        if (!ended) setFound(answer);
      } catch {
        // Airflow does not answer, which its own page shows
      }
    }
    look();
    const timer = setInterval(look, EVERY_MS);
    return () => { ended = true; clearInterval(timer); };
  }, []);
  if (found === null || (found.connections === 0 && found.unread.length === 0)) return null;
  const well = found.jobs.length === 0 && found.unread.length === 0;
  return h(
    "section",
    { "aria-label": "Stream jobs that need attention", style: { border: "1px solid var(--chakra-colors-border)", borderRadius: "8px", padding: "12px 16px", margin: "8px 0" } },
    h("h2", { style: { fontWeight: 600 } }, "Stream jobs that need attention"),
    well ? h("p", { style: { color: "var(--chakra-colors-fg-muted)" } }, `None of ${found.looked_at}.`) : null,
    h("ul", { style: { listStyle: "none", margin: 0, padding: 0 } }, found.jobs.map((job) => h(Row, { key: job.link, job }))),
    found.unread.map((text) => h("p", { key: text, role: "alert", style: { color: "var(--chakra-colors-fg-error)", overflowWrap: "anywhere" } }, text)),
  );
}

globalThis.AirflowPlugin = JobsInTrouble;

// Shows the newest content of the page in place: a reload would take away the focus, and the place of a screen reader.

const EVERY_MS = 10000;

function look() {
  if (document.hidden) return;
  const request = new XMLHttpRequest(); // it parses a document, which fetch does not
  request.responseType = "document";
  request.onload = () => {
    const fresh = request.status === 200 ? request.response?.querySelector("main") : null;
    if (request.responseURL !== location.href) location.reload(); // the page leads to another one by now
    else if (fresh && fresh.innerHTML !== document.querySelector("main").innerHTML) document.querySelector("main").replaceWith(fresh);
  };
  request.open("GET", location.href);
  request.send();
}

setInterval(look, EVERY_MS);

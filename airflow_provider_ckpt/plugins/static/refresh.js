// Shows the newest content of the page in place: a reload would lose the focus and the position of a screen reader.

const EVERY_MS = 10000;

function look() {
  if (document.hidden) return;
  const request = new XMLHttpRequest(); // it parses a document, which fetch does not
  request.responseType = "document";
  request.onload = () => {
    const fresh = request.status === 200 ? request.response?.querySelector("main") : null;
    if (request.responseURL !== location.href) location.reload(); // the page now redirects to another one
    else if (fresh && fresh.innerHTML !== document.querySelector("main").innerHTML) document.querySelector("main").replaceWith(fresh);
  };
  request.open("GET", location.href);
  request.send();
}

setInterval(look, EVERY_MS);

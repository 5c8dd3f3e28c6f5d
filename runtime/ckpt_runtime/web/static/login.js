// The form that takes the session's token once: the page neither stores it nor puts it into an address.

import { login } from "./api.js";
import { h } from "./dom.js";

export function loginForm(done) {
  const field = h("input", { id: "token", type: "password", autocomplete: "current-password", required: true, autofocus: true });
  const button = h("button", { type: "submit" }, "Log in");
  const message = h("p", { class: "bad", role: "alert" });

  async function submit(event) {
    event.preventDefault();
    button.disabled = true;
    message.textContent = "";
    try {
      await login(field.value);
      field.value = "";
      done();
    } catch (error) {
      message.textContent = error.status === 401 ? "This is not the session's token." : error.message;
      button.disabled = false;
      field.select();
    }
  }

  return h(
    "form",
    { class: "login", onsubmit: submit },
    h("h1", null, "Log in"),
    h("label", { for: "token" }, "The session's token"),
    field,
    button,
    message,
    h("p", { class: "note" }, "ckpt session start writes it into the session file, under token."),
  );
}

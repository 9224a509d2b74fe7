// Dialogs: an action asks for a reason, says what it does, and shows the command that does the same.

import { h, render } from "./dom.js";
import { plain } from "./format.js";
import { command, problem } from "./widgets.js";

// `run(reason)` returns a promise. Resolves to its result, or null if the user gave up.
export function act({ title, text, cli, button, danger, body, run }) {
  const opener = document.activeElement;
  return new Promise((resolve) => {
    const reason = h("textarea", { id: "reason", rows: "2", maxlength: "1000", required: true, placeholder: "Why? For example: provider is back, ticket OPS-17" });
    const says = h("div");
    const shown = h("div");
    const showCommand = () => {
      const why = reason.value.trim();
      const quoted = why ? ` --reason '${why.replaceAll("'", "'\\''")}'` : "";
      render(shown, command(cli + quoted));
    };
    const go = h("button", { type: "submit", class: danger ? "primary danger" : "primary" }, button);
    const dialog = h("dialog", { "aria-labelledby": "dialogtitle" },
      h("form", { on: { submit: async (event) => {
        event.preventDefault();
        if (!reason.value.trim()) { reason.focus(); return; }
        go.disabled = true;
        try {
          const found = await run(reason.value.trim());
          close(found);
        } catch (error) {
          go.disabled = false;
          render(says, problem(error));
        }
      } } },
      h("h2", { id: "dialogtitle" }, title), h("p", null, text), body || null,
      h("label", { for: "reason" }, "Reason (kept in the audit)"), reason,
      h("p.small", null, "The same on the command line:"), shown, says,
      h("div.buttons", null, go, h("button", { type: "button", on: { click: () => close(null) } }, "Cancel"))));
    const close = (found) => { dialog.close(); dialog.remove(); if (opener && opener.isConnected) opener.focus(); resolve(found); };
    reason.oninput = showCommand;
    dialog.oncancel = (event) => { event.preventDefault(); close(null); };
    showCommand();
    document.getElementById("dialogs").append(dialog);
    dialog.showModal();
    reason.focus();
  });
}

export function help(shortcuts) {
  const dialog = h("dialog", null, h("h2", null, "Keyboard"),
    h("dl.keys", null, shortcuts.map(([name, what]) => [h("dt", null, h("kbd", null, name)), h("dd", null, plain(what))])),
    h("div.buttons", null, h("button", { type: "button", class: "primary", on: { click: () => { dialog.close(); dialog.remove(); } } }, "Close")));
  dialog.onclose = () => dialog.remove();
  document.getElementById("dialogs").append(dialog);
  dialog.showModal();
}

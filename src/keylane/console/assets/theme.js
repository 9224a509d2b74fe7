// The theme before the first paint: the user's choice, or the system's.
(function () {
  try {
    const chosen = localStorage.getItem("keylane-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch { /* storage is off: the system's theme */ }
})();

// The theme that was chosen here, before anything is drawn; without one the system's preference counts.
"use strict";
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("wicore-theme"); } catch { /* storage is off */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();

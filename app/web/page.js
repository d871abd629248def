// Ctrl+Enter (Cmd+Enter) generates from anywhere in the form.
document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || event.repeat) return;
  const button = document.querySelector("#generate");
  if (button && button.offsetParent !== null) {
    event.preventDefault();
    button.click();
  }
});

// On a narrow screen the answer to a click lies below what was clicked: go there once it has been drawn.
function reveal(selector) {
  const since = Date.now();
  const look = setInterval(() => {
    const part = document.querySelector(selector);
    if (part || Date.now() - since > 3000) clearInterval(look);
    if (part) part.scrollIntoView({ behavior: "smooth", block: "start" });
  }, 150);
}
document.addEventListener("click", (event) => {
  if (window.innerWidth >= 768) return;
  if (event.target.closest("#generate")) reveal("#now .pr-now");
  const row = event.target.closest("#history button[data-job]");
  if (row) reveal(`#detail .pr-result[data-job="${row.dataset.job}"]`);
});

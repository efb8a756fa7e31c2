// A filter above the tables of the page of flags: all words must occur in a row.
const place = document.getElementById("flag-filter");
if (place) {
  const input = Object.assign(document.createElement("input"), {
    type: "search", placeholder: "Filter flags: words of name or text", ariaLabel: "Filter flags", className: "flag-filter",
  });
  const count = document.createElement("span");
  const sections = [];  // of the page: everything from a heading to the next one
  for (const element of document.querySelector("article").children) {
    if (element.tagName === "H2") sections.push([]);
    sections.at(-1)?.push(element);
  }
  const filter = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const section of sections) {
      let inSection = 0;
      for (const row of section.flatMap((element) => [...element.querySelectorAll("tbody tr")])) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        inSection += row.hidden ? 0 : 1;
      }
      const tables = section.flatMap((element) => [...element.querySelectorAll("table")]);  // Material wraps them later
      for (const element of [...section, ...tables]) element.hidden = words.length > 0 && !inSection;
      shown += inSection;
    }
    count.textContent = words.length ? ` ${shown} found` : "";
    history.replaceState(null, "", words.length ? `?filter=${encodeURIComponent(input.value)}` : location.pathname);
  };
  input.addEventListener("input", filter);
  place.append(input, count);
  input.value = new URLSearchParams(location.search).get("filter") || "";
  if (input.value) filter();
}

/* What net.js is to the page, for a view that was kept as one file: the answers are in the file, and there is no network. */

export const live = false;

export class Fault extends Error {}

const file = JSON.parse(document.getElementById("kept").textContent);
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

const image = (base64) => {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return createImageBitmap(new Blob([bytes], { type: "image/png" }));
};

function view(model, gates) {
  const found = file.views.find((each) => each.look.model === model && same(each.look.gates, gates));
  if (!found) throw new Fault("This part of the view was not saved.");
  return found;
}

export const keptState = file.state;
export const start = async () => ({ version: file.version, models: file.models, examples: [], upload_limit: 0 });
export const picture = async () => image(file.picture);
export const seen = async (model) => image(file.seen[model]);
export const look = async (model, _, gates) => view(model, gates).look;
export const rates = async (model, _, gates) => view(model, gates).rates;
export const upload = async () => Promise.reject(new Fault("A saved view takes no pictures."));
export const keep = async () => Promise.reject(new Fault("This view is saved already."));

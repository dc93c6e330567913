/* Numbers to colours, and maps over the grey picture that they belong to: one square per patch, nothing made up between them.
   dmst.analysis.membership draws the same in Python: ramp, grey, squares and strength are those. */

/* dark blue over grey to yellow: readable in grey and by everyone */
const RAMP = [[0, 32, 77], [21, 52, 109], [67, 78, 108], [102, 105, 112], [137, 134, 121], [176, 165, 113], [217, 199, 91], [255, 234, 70]];
const MISSING = [204, 121, 167];
/* one for each group, then again from the first */
const PALETTE = [
  [194, 255, 0], [0, 0, 93], [0, 255, 181], [0, 58, 90], [253, 36, 169], [143, 236, 117], [227, 119, 0], [142, 46, 197],
  [0, 71, 255], [93, 11, 0], [143, 255, 255], [255, 255, 92], [197, 34, 0], [162, 180, 255], [34, 0, 255], [12, 136, 91],
];

export const groupColour = (group) => PALETTE[group % PALETTE.length];

export function colour(value, low, high) {
  if (value === null || Number.isNaN(value)) return MISSING;
  const place = Math.min(Math.max((value - low) / Math.max(high - low, 1e-12), 0), 1) * (RAMP.length - 1);
  const below = Math.min(Math.floor(place), RAMP.length - 2);
  return RAMP[below].map((each, i) => Math.round(each * (1 - place + below) + RAMP[below + 1][i] * (place - below)));
}

const patches = document.createElement("canvas"); // one pixel a patch

/* groups: the group of each patch; its colour is stronger where its membership is larger, and gone where the group is off. */
function paintPatches(values, [rows, columns], { low, high, groups, off = [] }) {
  patches.width = columns;
  patches.height = rows;
  const pen = patches.getContext("2d");
  const pixels = pen.createImageData(columns, rows);
  const share = (value) => Math.min(Math.max((value - low) / Math.max(high - low, 1e-12), 0), 1);
  values.forEach((value, i) => {
    const plain = !groups || value === null;
    const alpha = plain ? 1 : off.includes(groups[i]) ? 0 : 0.7 + 0.3 * share(value);
    pixels.data.set([...(plain ? colour(value, low, high) : groupColour(groups[i])), Math.round(255 * alpha)], 4 * i);
  });
  pen.putImageData(pixels, 0, 0);
  return patches;
}

export const sizeOf = ([rows, columns], longest) => Math.max(1, Math.floor(longest / Math.max(rows, columns)));

/* A copy without colour, so that all colour is the map's. */
export function greyed(picture) {
  const canvas = Object.assign(document.createElement("canvas"), { width: picture.width, height: picture.height });
  const pen = canvas.getContext("2d");
  pen.drawImage(picture, 0, 0);
  const pixels = pen.getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < pixels.data.length; i += 4) {
    const [red, green, blue] = pixels.data.subarray(i, i + 3);
    pixels.data.fill(Math.round(0.299 * red + 0.587 * green + 0.114 * blue), i, i + 3);
  }
  pen.putImageData(pixels, 0, 0);
  return canvas;
}

/* values null: the picture alone. faint: a head that adds nothing, without its map. */
export function overlay(canvas, picture, values, grid, { strength, longest = 640, faint = false, marks = [], ...colours }) {
  const cell = sizeOf(grid, longest);
  const [height, width] = [grid[0] * cell, grid[1] * cell];
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const pen = canvas.getContext("2d");
  pen.globalAlpha = faint ? 0.3 : 1;
  pen.clearRect(0, 0, width, height);
  pen.imageSmoothingEnabled = picture.width > width;
  pen.drawImage(picture, 0, 0, width, height);
  pen.imageSmoothingEnabled = false;
  if (values && !faint) {
    pen.globalAlpha = strength;
    pen.drawImage(paintPatches(values, grid, colours), 0, 0, width, height);
  }
  pen.globalAlpha = 1;
  for (const { patch, thin, dashed } of marks) {
    pen.setLineDash(dashed ? [cell / 5, cell / 5] : []);
    const [x, y] = [(patch % grid[1]) * cell, Math.floor(patch / grid[1]) * cell];
    pen.lineWidth = thin ? 2 : 6;
    pen.strokeStyle = "#000";
    pen.strokeRect(x + 1, y + 1, cell - 2, cell - 2);
    pen.lineWidth = thin ? 1 : 3;
    pen.strokeStyle = "#fff";
    pen.strokeRect(x + 1, y + 1, cell - 2, cell - 2);
  }
}

export function ramp(canvas) {
  const pen = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x++) {
    pen.fillStyle = `rgb(${colour(x / (canvas.width - 1), 0, 1).join()})`;
    pen.fillRect(x, 0, 1, canvas.height);
  }
}

/* The whole picture inside a square, as large as it goes. */
export function contain(canvas, picture) {
  const pen = canvas.getContext("2d");
  const scale = Math.min(canvas.width / picture.width, canvas.height / picture.height);
  const [width, height] = [picture.width * scale, picture.height * scale];
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.imageSmoothingEnabled = scale < 1;
  pen.drawImage(picture, (canvas.width - width) / 2, (canvas.height - height) / 2, width, height);
}

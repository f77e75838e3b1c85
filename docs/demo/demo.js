import { planes, prepare, softmax, withoutExif } from "./pictures.js";

const SHOWN = 5;
const byId = (id) => document.getElementById(id);

async function fetched(name) {
  const answer = await fetch(name);
  if (!answer.ok) throw new Error(`${name} is missing: build the page with scripts/build_demo.py`);
  return answer;
}

async function loadModel() {
  const card = await (await fetched("./model.json")).json();
  say(`Loading the model, ${(card.bytes / 1e6).toFixed(0)} MB ...`);
  const ort = await import("./ort/ort.wasm.min.mjs");
  ort.env.wasm.numThreads = 1; // more need headers that a plain file server does not send
  const bytes = new Uint8Array(await (await fetched("./model.onnx")).arrayBuffer());
  const session = await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] });
  return { card, session, Tensor: ort.Tensor };
}

/** The bytes of the file as they are: not rotated, no colour profile applied, as `wbmm predict` reads them. */
async function decode(file) {
  const bytes = withoutExif(new Uint8Array(await file.arrayBuffer()));
  const bitmap = await createImageBitmap(new Blob([bytes], { type: file.type }), {
    colorSpaceConversion: "none",
    premultiplyAlpha: "none",
  });
  const { width, height } = bitmap;
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  const pixels = context.getImageData(0, 0, width, height).data;
  const data = new Uint8ClampedArray(3 * width * height);
  for (let i = 0, j = 0; i < pixels.length; i += 4, j += 3) {
    data[j] = pixels[i];
    data[j + 1] = pixels[i + 1];
    data[j + 2] = pixels[i + 2];
  }
  return { data, width, height };
}

async function classify(file) {
  const { card, session, Tensor } = await model;
  const seen = prepare(await decode(file), card);
  const start = performance.now();
  const input = new Tensor("uint8", planes(seen), [1, 3, card.size, card.size]);
  const outputs = await session.run({ [session.inputNames[0]]: input });
  const chances = softmax(outputs[session.outputNames[0]].data);
  const milliseconds = performance.now() - start;
  const best = chances.map((chance, number) => ({ chance, name: card.class_names[number] }));
  best.sort((a, b) => b.chance - a.chance);
  return { seen, milliseconds, best: best.slice(0, SHOWN) };
}

function say(text) {
  byId("status").textContent = text;
}

function show(file, { seen, milliseconds, best }) {
  const canvas = byId("seen");
  canvas.width = seen.width;
  canvas.height = seen.height;
  const pixels = new ImageData(seen.width, seen.height);
  for (let i = 0, j = 0; j < seen.data.length; i += 4, j += 3) {
    pixels.data.set(seen.data.subarray(j, j + 3), i);
    pixels.data[i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  byId("classes").replaceChildren(...best.map(row));
  byId("result").hidden = false;
  say(`${file.name}: ${best[0].name}, ${percent(best[0].chance)}. Computed here in ${milliseconds.toFixed(0)} ms.`);
}

function row({ name, chance }) {
  const part = (tag, className, text = "") => Object.assign(document.createElement(tag), { className, textContent: text });
  const item = part("li", "class");
  item.dataset.chance = chance.toFixed(6);
  const bar = part("span", "bar");
  bar.append(part("span", "fill"));
  bar.firstChild.style.width = `${100 * chance}%`;
  item.append(part("span", "name", name), part("span", "chance", percent(chance)), bar);
  return item;
}

function percent(chance) {
  return `${(100 * chance).toFixed(1)} %`.replace(" ", "\u00a0");
}

async function take(file) {
  if (!file) return;
  say(`Looking at ${file.name} ...`);
  try {
    show(file, await classify(file));
  } catch (error) {
    byId("result").hidden = true;
    const unreadable = error.name === "InvalidStateError" || error.name === "EncodingError";
    say(unreadable ? `${file.name} is not a picture that this browser reads: try JPEG, PNG or WebP.` : error.message);
  }
}

const drop = byId("drop");
byId("file").addEventListener("change", (event) => take(event.target.files[0]));
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  take(event.dataTransfer.files[0]);
});
drop.addEventListener("dragenter", () => drop.classList.add("over"));
drop.addEventListener("dragleave", () => drop.classList.remove("over"));
document.addEventListener("paste", (event) => take(event.clipboardData.files[0]));

const model = loadModel();
model.then(
  ({ card }) => {
    byId("names").textContent = card.class_names.join(", ");
    say("Ready.");
  },
  (error) => say(error.message),
);

// What `wbmm predict` does to a picture before the model sees it: resize the shorter side, cut out the centre.
// A canvas resizes in another way, which changes the classes. This is Pillow's bicubic filter: widened when the picture
// shrinks, in whole numbers, first along rows and then along columns. tests/docs/test_demo.py compares the bytes.

const BITS = 22; // of a weight after the point

function cubic(x) {
  x = Math.abs(x);
  if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
  if (x < 2) return ((2.5 - 0.5 * x) * x - 4) * x + 2;
  return 0;
}

/** For each of `to` pixels along an axis: the first of the `from` source pixels it is made of, and their weights. */
function filters(from, to) {
  const step = from / to;
  const width = Math.max(step, 1);
  return Array.from({ length: to }, (_, i) => {
    const centre = (i + 0.5) * step;
    const first = Math.max(0, Math.trunc(centre - 2 * width + 0.5));
    const end = Math.min(from, Math.trunc(centre + 2 * width + 0.5));
    const values = Array.from({ length: end - first }, (_, k) => cubic((first + k - centre + 0.5) / width));
    const total = values.reduce((sum, value) => sum + value, 0);
    return { first, weights: Int32Array.from(values, (value) => wholeNumber((value / total) * 2 ** BITS)) };
  });
}

function wholeNumber(value) {
  return Math.trunc(value + Math.sign(value) * 0.5);
}

/** Shrinks or stretches one axis. `pixel` and `line` are the distances in `data` between pixels and between lines. */
function resizeAxis(data, from, to, lines, pixel, line, toPixel, toLine) {
  const out = new Uint8ClampedArray(to * lines * 3);
  filters(from, to).forEach(({ first, weights }, i) => {
    for (let j = 0; j < lines; j++) {
      for (let channel = 0; channel < 3; channel++) {
        let sum = 1 << (BITS - 1); // rounds
        let at = j * line + first * pixel + channel;
        for (let k = 0; k < weights.length; k++, at += pixel) sum += data[at] * weights[k];
        out[j * toLine + i * toPixel + channel] = sum >> BITS;
      }
    }
  });
  return out;
}

/** A JPEG file without its EXIF parts: browsers turn a photo as they say, and `wbmm predict` does not. */
export function withoutExif(bytes) {
  const kept = [bytes.subarray(0, 2)];
  let at = 2;
  if (bytes[0] !== 0xff || bytes[1] !== 0xd8) return bytes; // another format
  while (at + 4 <= bytes.length && bytes[at] === 0xff && bytes[at + 1] !== 0xda) {
    const end = at + 2 + 256 * bytes[at + 2] + bytes[at + 3];
    if (bytes[at + 1] !== 0xe1) kept.push(bytes.subarray(at, end));
    at = end;
  }
  kept.push(bytes.subarray(at));
  const out = new Uint8Array(kept.reduce((sum, part) => sum + part.length, 0));
  kept.reduce((place, part) => (out.set(part, place), place + part.length), 0);
  return out;
}

/** A picture is { data: RGB bytes row by row, width, height }. */
export function resize({ data, width, height }, toWidth, toHeight) {
  if (width !== toWidth) data = resizeAxis(data, width, toWidth, height, 3, 3 * width, 3, 3 * toWidth);
  if (height !== toHeight) data = resizeAxis(data, height, toHeight, toWidth, 3 * toWidth, 3, 3 * toWidth, 3);
  return { data, width: toWidth, height: toHeight };
}

export function crop({ data, width, height }, size) {
  const left = halfEven((width - size) / 2);
  const top = halfEven((height - size) / 2);
  const out = new Uint8ClampedArray(3 * size * size);
  for (let row = 0; row < size; row++) {
    const start = 3 * ((top + row) * width + left);
    out.set(data.subarray(start, start + 3 * size), 3 * row * size);
  }
  return { data: out, width: size, height: size };
}

/** As Python rounds: halves go to the even neighbour. */
function halfEven(value) {
  const down = Math.floor(value);
  if (value - down !== 0.5) return Math.round(value);
  return down % 2 === 0 ? down : down + 1;
}

/** The square that the model sees. */
export function prepare(picture, { size, crop_pct }) {
  const shorter = Math.floor(size / crop_pct);
  const { width, height } = picture;
  const longer = Math.trunc((shorter * Math.max(width, height)) / Math.min(width, height));
  const [toWidth, toHeight] = width <= height ? [shorter, longer] : [longer, shorter];
  return crop(resize(picture, toWidth, toHeight), size);
}

/** Bytes in the model's order: all of red, then green, then blue. */
export function planes({ data, width, height }) {
  const count = width * height;
  return Uint8Array.from({ length: 3 * count }, (_, i) => data[3 * (i % count) + Math.floor(i / count)]);
}

export function softmax(logits) {
  const most = Math.max(...logits);
  const powers = Array.from(logits, (value) => Math.exp(value - most));
  const total = powers.reduce((sum, value) => sum + value, 0);
  return powers.map((value) => value / total);
}

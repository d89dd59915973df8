// Why a run shows no images, or not all of them: in words, from its folder and the jobs.

import { plural } from "./api.js";
import { queued } from "./job_card.js";
import { isActive, isEnded } from "./jobs.js";

// True if a job trains the run in this folder.
export const trainsIn = (folder, { jobs }) =>
  jobs.some((job) => job.kind === "train" && job.about?.output_dir === folder && isActive(job));

// `images`: what the folder has, {samples, waiting, steps, decoder, at_a_time}; empty if all is shown. `answer`: of the jobs.
export function whyNotShown(folder, { samples, waiting, steps, decoder, at_a_time: count }, answer) {
  const trains = trainsIn(folder, answer);
  if (!waiting) return samples.length ? "" : noneYet(trains, count, steps);
  const many = plural(waiting, samples.length ? "more image" : "image"), are = waiting === 1 ? "is" : "are";
  const decoding = answer.jobs.find((job) => job.about?.decoded === folder && !isEnded(job));
  const on = (device) => (device === "cpu" ? " on the CPU" : "");
  if (decoding && isActive(decoding)) {
    return `${many} ${are} being decoded${on(decoding.about.device)}${trains ? ", while the run trains" : ""}.`;
  }
  if (decoding) return `${many} to decode: ${queued(decoding, answer)}.`;
  if (decoder && trains) return `${many} ${are} about to be decoded by the run${on(decoder)}.`;
  const kept = `${many} ${are} stored as latents, because`;
  if (decoder) return `${kept} the run ended before it decoded them. Decode images, above, shows them.`;
  const beside = trains ? ", on the CPU, while the run trains" : "";
  const reason = "this run keeps them for later (validation.vae_device is not set)";
  return `${kept} ${reason}. Decode images, above, shows them${beside}.`;
}

function noneYet(trains, count, steps) {
  if (count === 0) {
    return "This run makes no images: it has neither prompts nor samples to show. Choose some for the next run, in the form above.";
  }
  if (!trains) return steps.length ? "The images of this run were removed." : "No images: the run ended before it made any.";
  return "No images yet: the first ones come before the first step.";
}

// The Train page: a form that becomes a command line, and the runs with their curves, images and log.

import { at, showError } from "./api.js";
import { TrainForm } from "./train_form.js";
import { Runs } from "./train_runs.js";

const runs = new Runs();
const form = new TrainForm({ onstart: (job) => runs.show([job.about.output_dir], true) });
const loaded = form.load();
runs.onclone = (folder) => loaded.then(() => form.fillFrom(folder));
runs.onfirst = (hasRuns) => { at("new-run").open ||= !hasRuns; };
loaded.catch(showError);
runs.begin();

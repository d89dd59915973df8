// A form that is a command line: after each change it is kept in this browser, and the program is asked for its line
// and for what is wrong, which is shown at the fields and in a list. Its buttons work while there is a line.

import { act, at, commandLine, element, newest, post } from "./api.js";
import { choose, keep } from "./project.js";
import { showProblem } from "./settings_form.js";

const PAUSE = 300; // ms after a change until the line is asked for

export class CommandForm {
  // `name`: of what is kept. `path`: of the route that answers {line} and perhaps {problems}, or refuses with an error.
  // `body()`: what it gets; null while there is nothing to ask for. `choices()`: what all pages share. `values()`: what
  // is kept besides. `settings`: the SettingsForm. `fields`: the ids of other inputs, by their settings. `place`, `label`: of the line. `buttons`: ids.
  // `isUseless(id)`: whether a button has nothing to do. `onanswer(problems)` is called after each answer.
  constructor(options) {
    Object.assign(this, { fields: {}, isUseless: () => false, onanswer: () => {} }, options);
    Object.assign(this, { line: "", running: new Set() });
    this.look = newest((body) => this.check(body), (answer, body) => this.take(answer, body));
    this.enable();
  }

  changed() {
    choose(this.choices());
    keep(this.name, this.values());
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), PAUSE);
  }

  ask() {
    clearTimeout(this.timer);
    return this.look(this.body());
  }

  // The answer to a form, or what it is refused for.
  async check(body) {
    if (!body) return { line: "" };
    try {
      return await post(this.path, body);
    } catch (error) {
      if (!error.status || error.status >= 500) throw error;
      const problem = ({ where, message: what, expected, found, do: remedy }) => ({ key: where ?? "", what, expected, found, do: remedy });
      return { line: "", problems: [error, ...error.others].map(problem) };
    }
  }

  take(answer, body) {
    const { line, problems = [] } = answer;
    this.answer = answer;
    if (line !== this.line || !line) {
      const nothing = body ? [element("p", { class: "muted" }, "No command yet: see below what is missing.")] : [];
      this.place.replaceChildren(...(line ? [commandLine(line, this.label)] : nothing));
    }
    this.line = line;
    this.showProblems(problems);
    this.enable();
    this.onanswer(problems);
  }

  showProblems(problems) {
    const texts = {};
    for (const each of problems) texts[each.key] ??= text(each);
    for (const [key, id] of Object.entries(this.fields)) showProblem(at(id), texts[key]);
    this.settings.showProblems(texts);
    const list = at("problems"), lines = problems.map((each) => [each.key && this.title(each.key), text(each)].filter(Boolean).join(": "));
    if (list.dataset.shown === lines.join("\n")) return;
    list.dataset.shown = lines.join("\n");
    list.hidden = !lines.length;
    list.replaceChildren(element("ul", {}, ...lines.map((each) => element("li", {}, each))));
  }

  // The label of a field, or the title of a setting.
  title(key) {
    const id = this.fields[key];
    return id ? document.querySelector(`label[for="${id}"]`)?.textContent ?? key : this.settings.title(key);
  }

  enable() { for (const id of this.buttons) at(id).disabled = !this.line || this.isUseless(id) || this.running.has(id); }

  // Check the form as it is now, and send that to another route; null, with the problems shown, if it is no command.
  async send(path) {
    const body = this.body(), answer = await this.check(body);
    if (JSON.stringify(this.body()) === JSON.stringify(body)) this.take(answer, body); // else the user has changed it
    return answer.line ? post(path, body) : null;
  }

  // Run an action of the button with this id; until it ends, the button stays disabled.
  act(id, action) {
    const run = () => { this.running.add(id); return action().finally(() => this.running.delete(id)); };
    return act(at(id), run).then(() => this.enable());
  }
}

const text = (problem) => [
  problem.what, problem.expected && `expected: ${problem.expected}`, problem.found && `found: ${problem.found}`,
  problem.do && `→ ${problem.do}`,
].filter(Boolean).join("\n");

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "aie/emulator/emulator.h"

namespace flownpu::emulator {
namespace {

using Path = std::vector<const Agent*>;

// Follows the waiting agents, depth first, until an agent is met again. Then there is a circle, and
// `path` ends with that agent a second time. Returns false if there is none; `dead_end` is then the
// first path to an agent that nobody can help.
bool find_circle(const Agent& agent, Path& path, Path& seen, Path& dead_end) {
  const bool again = std::find(path.begin(), path.end(), &agent) != path.end();
  path.push_back(&agent);
  if (again) return true;
  if (std::find(seen.begin(), seen.end(), &agent) == seen.end()) {
    seen.push_back(&agent);
    const Wait wait = agent.wait();
    for (const Agent* giver : wait.givers) {
      if (find_circle(*giver, path, seen, dead_end)) return true;
    }
    if (wait.givers.empty() && dead_end.empty()) dead_end = path;
  }
  path.pop_back();
  return false;
}

std::string line(const Agent& agent) {
  const Wait wait = agent.wait();
  if (wait.what.empty()) return "\n  " + agent.name() + "\n    has ended";
  std::string text = "\n  " + agent.name() + "\n    waits for " + wait.what;
  for (const Agent* giver : wait.givers) {
    text += (giver == wait.givers.front() ? ", which is to come from " : ", or ") + giver->name();
  }
  return wait.givers.empty() ? text + ", which nobody gives" : text;
}

}  // namespace

std::string describe_deadlock(const Agent& start) {
  Path path;
  Path seen;
  Path dead_end;
  std::string text = "[emulator] deadlock: nothing can go on";
  if (!find_circle(start, path, seen, dead_end)) {
    text += "; what is waited for is given by nobody:";
    for (const Agent* agent : dead_end) text += line(*agent);
    return text;
  }
  const auto first = std::find(path.begin(), path.end(), path.back());
  if (first != path.begin()) text += ':';
  for (auto agent = path.begin(); agent != first; ++agent) text += line(**agent);
  text += first == path.begin() ? "; these wait for each other in a circle:"
                                : "\n and these wait for each other in a circle:";
  for (auto agent = first; agent != path.end() - 1; ++agent) text += line(**agent);
  return text;
}

}  // namespace flownpu::emulator

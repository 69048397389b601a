// SPDX-License-Identifier: Apache-2.0
// What the figures of a run depend on besides the program's flags: machine, system, libraries, build, variables.
#ifndef EXAMPLES_TRAIN_ENVIRONMENT_H_
#define EXAMPLES_TRAIN_ENVIRONMENT_H_

#include <string>
#include <utility>
#include <vector>

namespace examples {

struct EnvironmentSources {
  std::string root = {};                                       // "/proc" and "/sys" are looked for in this folder
  std::vector<std::string> variables;                          // as "NAME=value"
  std::vector<int> processors;                                 // those that this process may use
  std::vector<std::pair<std::string, std::string>> libraries;  // versions of those that the program knows itself
};

// Those of this process.
EnvironmentSources ThisProcess();

// Returns a JSON object:
//   date, system, cpu (model, sockets, cores, hardware_threads, caches, ...), cpu_mhz, numa_nodes, memory_mib,
//   gpus (name, memory_mib, clock_mhz; with `gpu`), libraries (their versions), build, launcher, variables.
// It names no host, user or file. Of the environment it contains only variables that change how the program computes
// or communicates. What cannot be found out is left out. With `gpu` it loads the libraries of the GPU.
std::string DescribeEnvironment(const std::string& launcher, bool gpu,
                                const EnvironmentSources& sources = ThisProcess());

}  // namespace examples

#endif  // EXAMPLES_TRAIN_ENVIRONMENT_H_

// SPDX-License-Identifier: Apache-2.0
// What ddp_doctor looks at, as far as it can be read without starting NCCL. A test fills it in itself, or plants the
// files that it is read from.
#ifndef TOOLS_DOCTOR_FACTS_H_
#define TOOLS_DOCTOR_FACTS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace doctor {

struct PciLink {
  int width = 0, max_width = 0;     // lanes; 0: unknown
  double speed = 0, max_speed = 0;  // GT/s
};

struct Gpu {
  std::string bus_id;  // "0000:5d:00.0"
  std::string name, uuid;
  int compute_major = 0, compute_minor = 0;  // 0: unknown
  PciLink link;
  int numa_node = -1;                    // -1: unknown, or there is one only
  std::vector<int> near_processors;      // empty: unknown
  std::vector<std::string> redirecting;  // bridges above it whose ACS redirects what GPUs send each other
  std::vector<std::string> slowed_by;    // why its clock is low
};

struct Facts {
  std::string system;  // "Linux 6.1.0"
  bool wsl = false;
  int nvidia_devices = 0;                        // on the PCI bus, whatever the driver says
  std::string driver;                            // "570.86.15"; empty: none
  int driver_cuda = 0;                           // the newest CUDA that the driver runs, as 12080 for 12.8; 0: unknown
  std::string cuda_error;                        // why CUDA does not start; empty: it does, or sees no GPU
  std::string built_cuda;                        // the CUDA that libddp was built with; empty: none
  std::vector<Gpu> gpus;                         // those that this process sees
  std::vector<std::pair<int, int>> without_p2p;  // pairs of GPUs for which the driver offers no P2P

  bool nccl_built = false;
  std::string nccl_error;  // why it cannot be loaded
  int nccl_version = 0;    // 22809
  bool cudnn = false;
  std::vector<std::string> doubtful_variables;  // sentences
  std::string wrong_variable;                   // of libddp's own: a sentence
  std::string backend = "auto";                 // DDP_BACKEND

  bool iommu = false, acs_readable = true;
  int64_t shared_memory_mib = -1;  // of /dev/shm; -1: there is none
  int64_t free_shared_memory_mib = -1;
  int64_t locked_memory_kib = -1;  // -1: no limit
  int ptrace_scope = 0;
  bool single_copy_off = false;  // DDP_SINGLE_COPY=off

  bool mpi_built = false;
  std::string launcher = "none";
  int rank = 0, ranks = 1, local_rank = 0, local_ranks = 1;
  std::vector<int> processors;  // that this process may use
  int online_processors = 0;
  int shared_processors = 0;  // that the ranks of this host may use between them; 0: unknown
  int store_port = 0;         // that the ranks will meet at; 0: none is needed
  bool store_port_taken = false;
};

// Of this process and machine. Files of the system are looked for under `root`; libraries of the driver by these names.
struct FactSources {
  std::string root = {};
  std::string cuda = "libcuda.so.1", nvml = "libnvidia-ml.so.1", cudnn = "libcudnn.so.9";
  std::function<void(const char* what)> progress = [](const char*) {};  // what is looked at from now on
};
Facts GatherFacts(const FactSources& sources = {});

// The parts that come from files alone.
void ReadPci(const std::string& root, Facts& facts);
void ReadSystem(const std::string& root, Facts& facts);

// "0-3,8" as numbers.
std::vector<int> ParseList(const std::string& text);

// Whether the configuration space of a PCI bridge says that its ACS redirects requests or completions between devices
// below it; nothing if the bytes do not reach so far, as where the reader is not root.
std::optional<bool> RedirectsP2p(const std::string& config_space);

}  // namespace doctor

#endif  // TOOLS_DOCTOR_FACTS_H_

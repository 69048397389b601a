// SPDX-License-Identifier: Apache-2.0
#include "tools/doctor/checks.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"

namespace doctor {
namespace {

constexpr int64_t kLittleSharedMib = 512, kLittleLockedKib = 64 << 10;
constexpr int kCudaForBlackwell = 12080, kNcclForBlackwell = 22602;

std::string CudaText(int version) { return absl::StrCat(version / 1000, ".", version % 1000 / 10); }
std::string NcclText(int version) {
  return absl::StrCat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}
// "12.8" as 12080.
int CudaNumber(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, '.');
  int major = 0, minor = 0;
  if (!absl::SimpleAtoi(parts[0], &major)) return 0;
  if (parts.size() > 1) (void)absl::SimpleAtoi(parts[1], &minor);
  return major * 1000 + minor * 10;
}

class Checker {
 public:
  explicit Checker(const Facts& facts) : facts_(facts) {}
  Findings Run() {
    CheckDriver();
    CheckCompute();
    CheckNccl();
    for (size_t i = 0; i < facts_.gpus.size(); ++i) CheckGpu(i);
    CheckP2p();
    CheckMemory();
    CheckVariables();
    CheckRanks();
    return std::move(findings_);
  }

 private:
  template <typename... Parts>
  void Say(Severity severity, const char* check, std::string remedy, const Parts&... text) {
    findings_.push_back({severity, check, absl::StrCat(text...), std::move(remedy)});
  }
  // A container may hide its version.
  std::string DriverText() const { return facts_.driver.empty() ? "of unknown version" : facts_.driver; }
  bool gpus() const { return !facts_.gpus.empty(); }

  void CheckDriver() {
    Say(Severity::kOk, "system", "", facts_.system, ", ", facts_.online_processors, " processors");
    if (facts_.wsl) {
      Say(Severity::kNote, "wsl", "", "this is WSL2, on which libddp has not been tried: please send a report");
    }
    if (facts_.nvidia_devices > 0 && facts_.driver.empty() && facts_.driver_cuda == 0) {
      return Say(Severity::kError, "driver", "install NVIDIA's driver, or load it: modprobe nvidia",
                 facts_.nvidia_devices, " NVIDIA GPU", facts_.nvidia_devices == 1 ? "" : "s",
                 " on the PCI bus, but no driver: training runs on the CPU only");
    }
    if (!facts_.cuda_error.empty()) {
      return Say(
          Severity::kError, "cuda_start",
          "look for Xid errors and for nvidia in dmesg; after an update of the driver reboot, otherwise: modprobe "
          "nvidia_uvm, and with NVSwitch: systemctl start nvidia-fabricmanager",
          "driver ", DriverText(), " is there, but CUDA does not start (", facts_.cuda_error, ")");
    }
    if (!gpus() && facts_.nvidia_devices > 0) {
      return Say(Severity::kError, "visible", "unset CUDA_VISIBLE_DEVICES, or look at nvidia-smi and dmesg", "driver ",
                 DriverText(), " is there, but this process sees no GPU");
    }
    if (!gpus()) return Say(Severity::kNote, "gpus", "", "no GPU: training runs on the CPU");
    for (const Gpu& gpu : facts_.gpus) {
      Say(Severity::kOk, "gpus", "", "GPU ", gpu.bus_id, gpu.name.empty() ? "" : " ", gpu.name, ", driver ",
          DriverText());
    }
    const int built = CudaNumber(facts_.built_cuda);
    if (built == 0) {
      Say(Severity::kError, "cuda_build", "configure with -DDDP_WITH_CUDA=ON, and CUDA 12.8 or newer in the PATH",
          "libddp was built without CUDA: it cannot use the GPUs");
    } else if (facts_.driver_cuda > 0 && facts_.driver_cuda / 1000 < built / 1000) {
      Say(Severity::kError, "driver_cuda", "update the driver, or build libddp with an older CUDA", "driver ",
          DriverText(), " runs CUDA ", CudaText(facts_.driver_cuda), " at most, and libddp was built with CUDA ",
          facts_.built_cuda);
    }
  }

  void CheckCompute() {
    for (const Gpu& gpu : facts_.gpus) {
      if (gpu.compute_major < 12) continue;
      const std::string what =
          absl::StrCat("GPU ", gpu.bus_id, " (compute capability ", gpu.compute_major, ".", gpu.compute_minor, ")");
      if (facts_.driver_cuda > 0 && facts_.driver_cuda < kCudaForBlackwell) {
        Say(Severity::kError, "blackwell_cuda", "update the driver", what,
            " needs a driver that runs CUDA 12.8; this one runs ", CudaText(facts_.driver_cuda));
      }
      if (facts_.nccl_version > 0 && facts_.nccl_version < kNcclForBlackwell) {
        Say(Severity::kError, "blackwell_nccl", "install libnccl2 2.26.2 or newer, or name one by DDP_NCCL_LIBRARY",
            what, " needs NCCL 2.26.2; this one is ", NcclText(facts_.nccl_version),
            ", which asks for more shared memory than the GPU has");
      }
    }
  }

  void CheckNccl() {
    if (!gpus()) return;
    if (!facts_.nccl_built) {
      Say(Severity::kWarning, "nccl_build", "configure with -DDDP_WITH_CUDA=ON -DDDP_WITH_NCCL=ON",
          "libddp was built without NCCL");
    } else if (!facts_.nccl_error.empty()) {
      Say(Severity::kError, "nccl", "apt-get install libnccl2, or DDP_NCCL_LIBRARY=/path/to/libnccl.so.2",
          facts_.nccl_error);
    } else {
      Say(Severity::kOk, "nccl", "", "NCCL ", NcclText(facts_.nccl_version));
    }
    if (!facts_.cudnn) {
      Say(Severity::kNote, "cudnn", "apt-get install cudnn9-cuda-12",
          "cuDNN 9 cannot be loaded: the example trainers need it on GPUs, libddp does not");
    }
  }

  void CheckGpu(size_t index) {
    const Gpu& gpu = facts_.gpus[index];
    if (gpu.link.width > 0 && gpu.link.width < gpu.link.max_width) {
      Say(Severity::kWarning, "pcie_width",
          "reseat the card, use a slot with all lanes, or see in the firmware how lanes are shared", "GPU ", gpu.bus_id,
          " has ", gpu.link.width, " of ", gpu.link.max_width, " PCIe lanes: gradients travel that much slower");
    }
    // An idle GPU lowers its link's speed: said, not warned about.
    if (gpu.link.speed > 0 && gpu.link.speed < gpu.link.max_speed) {
      Say(Severity::kNote, "pcie_speed",
          absl::StrCat("under load: nvidia-smi -q -i ", gpu.bus_id, " | grep -A8 'GPU Link Info'"),
          absl::StrFormat("GPU %s has PCIe at %g of %g GT/s; an idle GPU slows its link down, a busy one must not",
                          gpu.bus_id, gpu.link.speed, gpu.link.max_speed));
    }
    if (!gpu.slowed_by.empty()) {
      Say(Severity::kWarning, "clocks", absl::StrCat("nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i ", gpu.bus_id),
          "GPU ", gpu.bus_id, " runs below its clock: ", absl::StrJoin(gpu.slowed_by, ", "));
    }
  }

  void CheckP2p() {
    if (facts_.gpus.size() < 2) return;
    if (!facts_.without_p2p.empty()) {
      std::vector<std::string> pairs;
      for (const auto& [a, b] : facts_.without_p2p) pairs.push_back(absl::StrCat(a, "-", b));
      Say(Severity::kNote, "p2p_driver", "", "the driver offers no P2P between GPUs ", absl::StrJoin(pairs, ", "),
          ": NCCL goes through host memory there");
    }
    std::set<std::string> bridges;
    for (const Gpu& gpu : facts_.gpus) bridges.insert(gpu.redirecting.begin(), gpu.redirecting.end());
    if (!bridges.empty()) {
      Say(Severity::kWarning, "acs",
          absl::StrCat("turn ACS off in the firmware, or as root: for b in ", absl::StrJoin(bridges, " "),
                       "; do setpci -s $b ECAP_ACS+6.w=0000; done"),
          "PCIe ACS is on above the GPUs: what they send each other goes up to the processor, is slower, and may hang");
    } else if (!facts_.acs_readable) {
      Say(Severity::kNote, "acs", "run ddp_doctor as root", "whether PCIe ACS is on cannot be read by this user");
    }
    if (facts_.iommu) {
      Say(Severity::kWarning, "iommu", "turn the IOMMU off in the firmware, or boot with iommu=pt",
          "an IOMMU is on: on some machines P2P between GPUs then hangs, or moves wrong data");
    }
  }

  void CheckMemory() {
    const bool several = facts_.local_ranks > 1 || facts_.gpus.size() > 1;
    if (several && facts_.shared_memory_mib < 0) {
      Say(Severity::kWarning, "shm", "mount -t tmpfs tmpfs /dev/shm", "there is no /dev/shm, which NCCL needs");
    } else if (several && facts_.shared_memory_mib < kLittleSharedMib) {
      Say(Severity::kWarning, "shm", "start the container with --shm-size=1g, or mount -o remount,size=1g /dev/shm",
          "/dev/shm has ", facts_.shared_memory_mib, " MiB, which NCCL and the ranks share: it may become full");
    } else if (several && facts_.free_shared_memory_mib < kLittleSharedMib) {
      Say(Severity::kWarning, "shm", "ls -l /dev/shm shows what fills it; rm what ended programs have left",
          "of /dev/shm ", facts_.free_shared_memory_mib, " MiB are free, of ", facts_.shared_memory_mib,
          ": it may become full");
    }
    if (several && facts_.locked_memory_kib >= 0 && facts_.locked_memory_kib < kLittleLockedKib) {
      Say(Severity::kNote, "memlock", "ulimit -l unlimited, or start the container with --ulimit memlock=-1",
          "a process may lock ", facts_.locked_memory_kib, " KiB of memory: InfiniBand needs more");
    }
    if (facts_.local_ranks > 1 && facts_.ptrace_scope > 0 && !facts_.single_copy_off) {
      Say(Severity::kNote, "ptrace", "sysctl kernel.yama.ptrace_scope=0, or a container with --cap-add=SYS_PTRACE",
          "kernel.yama.ptrace_scope is ", facts_.ptrace_scope,
          ": ranks may not read each other's memory, so large arrays outside of Allocate are copied once more");
    }
  }

  void CheckVariables() {
    for (const std::string& problem : facts_.doubtful_variables) {
      Say(Severity::kWarning, "nccl_variable", absl::StrCat("unset ", problem.substr(0, problem.find('='))), problem);
    }
    if (!facts_.wrong_variable.empty()) {
      Say(Severity::kError, "variable", "correct or unset it; docs/environment.md lists all", facts_.wrong_variable);
    }
    if (facts_.backend == "nccl" && facts_.gpus.empty()) {
      Say(Severity::kError, "backend", "unset DDP_BACKEND", "DDP_BACKEND is nccl, and this rank sees no GPU");
    } else if (facts_.backend == "local" && facts_.ranks > 1) {
      Say(Severity::kError, "backend", "unset DDP_BACKEND", "DDP_BACKEND is local, which is for one rank, not for ",
          facts_.ranks);
    }
  }

  void CheckRanks() {
    if (!facts_.mpi_built) {
      Say(Severity::kNote, "mpi", "apt-get install openmpi-bin libopenmpi-dev, and build libddp again",
          "libddp was built without MPI: start ranks by torchrun or srun, on one host");
    }
    if (facts_.store_port_taken) {
      Say(Severity::kError, "store_port", "set DDP_STORE_PORT to a free port on all ranks", "port ", facts_.store_port,
          ", where the ranks are to meet, is in use");
    }
    const int processors = static_cast<int>(facts_.processors.size());
    if (facts_.online_processors > 0 && facts_.local_ranks > facts_.online_processors) {
      Say(Severity::kWarning, "oversubscribed", absl::StrCat("mpirun -n ", facts_.online_processors),
          facts_.local_ranks, " ranks share ", facts_.online_processors, " processors");
    } else if (facts_.shared_processors > 0 && facts_.local_ranks > facts_.shared_processors) {
      Say(Severity::kWarning, "oversubscribed", "start them without taskset, or in a larger cpuset", facts_.local_ranks,
          " ranks may use ", facts_.shared_processors, " of this host's ", facts_.online_processors, " processors");
    } else if (facts_.local_ranks > 1 && processors == 1 && facts_.online_processors > facts_.local_ranks) {
      Say(Severity::kNote, "binding", "mpirun --bind-to numa", "this rank may use one processor only, of ",
          facts_.online_processors, ": its data loading and libddp's own thread share it");
    }
    const size_t mine = static_cast<size_t>(facts_.local_rank);
    if (mine >= facts_.gpus.size() || facts_.gpus[mine].near_processors.empty() || processors == 0) return;
    const std::vector<int>& near = facts_.gpus[mine].near_processors;
    const bool any_near = std::any_of(facts_.processors.begin(), facts_.processors.end(),
                                      [&](int p) { return std::find(near.begin(), near.end(), p) != near.end(); });
    if (!any_near) {
      Say(Severity::kWarning, "numa",
          absl::StrCat("bind the rank to NUMA node ", facts_.gpus[mine].numa_node, ": numactl --cpunodebind=",
                       facts_.gpus[mine].numa_node, " PROGRAM, or mpirun --map-by numa --bind-to numa"),
          "rank ", facts_.rank, " runs on processors far from its GPU ", facts_.gpus[mine].bus_id);
    }
  }

  const Facts& facts_;
  Findings findings_;
};

}  // namespace

Findings Check(const Facts& facts) { return Checker(facts).Run(); }

Finding CheckProbe(const ddp::ProbeReport& report) {
  ddp::ProbeReport without_remedy = report;
  without_remedy.remedy.clear();
  Finding finding = {Severity::kOk, "nccl_probe", ddp::Describe(without_remedy), report.remedy};
  switch (report.verdict) {
    case ddp::ProbeVerdict::kWorks:
      if (!report.warning.empty())
        finding = {Severity::kWarning, "nccl_probe", "NCCL works, but slowly", report.warning};
      break;
    case ddp::ProbeVerdict::kWorksWithoutP2p:
      finding.severity = Severity::kWarning;
      if (finding.remedy.empty()) finding.remedy = "export NCCL_P2P_DISABLE=1";
      break;
    default:
      finding.severity = Severity::kError;
      if (finding.remedy.empty()) finding.remedy = "see the other findings; NCCL_DEBUG=INFO says more";
  }
  return finding;
}

Findings CheckChoice(const AutoFacts& facts) {
  const bool set = !facts.backend.empty() && facts.backend != "auto";
  if (facts.choice.empty()) {
    return {{Severity::kError, "auto_choice", facts.why,
             "see the other findings; CPUs can train (ContextOptions::device)"}};
  }
  if (set && facts.backend == "nccl" && facts.choice != "nccl") {
    return {{Severity::kError, "auto_choice",
             absl::StrCat("DDP_BACKEND=nccl makes programs use what does not work here; auto would choose ", facts.why),
             "unset DDP_BACKEND"}};
  }
  if (set) {
    return {{Severity::kNote, "auto_choice",
             absl::StrCat("DDP_BACKEND=", facts.backend, " makes programs use ", facts.backend,
                          " without a check; auto would choose ", facts.why),
             "unset DDP_BACKEND"}};
  }
  Findings findings = {{Severity::kOk, "auto_choice", absl::StrCat("auto chooses ", facts.why), ""}};
  if (facts.fresh || !facts.remembers) {
    findings.push_back({Severity::kNote, "auto_cache",
                        absl::StrCat(facts.fresh ? "DDP_FRESH_PROBE=1" : "DDP_PROBE_CACHE",
                                     " makes each start check NCCL again, which takes seconds"),
                        absl::StrCat("unset ", facts.fresh ? "DDP_FRESH_PROBE" : "DDP_PROBE_CACHE")});
  } else if (facts.remembered.has_value() && facts.remembered->verdict != facts.verdict) {
    findings.push_back({Severity::kWarning, "auto_cache",
                        absl::StrCat("an earlier start has found otherwise, and the next one believes it: ",
                                     ddp::Describe(*facts.remembered)),
                        "DDP_FRESH_PROBE=1 at the next start"});
  } else {
    findings[0].text += facts.remembered.has_value()
                            ? ", which an earlier start has found, too: the next one checks nothing"
                            : "; nothing is remembered of these GPUs: the next start checks NCCL";
  }
  return findings;
}

std::string MoreTime(absl::Duration limit) {
  return absl::StrCat("ddp_doctor --limit ", absl::ToInt64Seconds(std::max(3 * limit, absl::Seconds(60))));
}

Finding CutOff(const std::string& what, absl::Duration limit) {
  return {Severity::kError, "cut_off",
          absl::StrCat("the time was over (", absl::FormatDuration(limit), ") when ddp_doctor was at ", what,
                       ": it hangs there, or is slow; what comes later was left out"),
          absl::StrCat("give it more: ", MoreTime(limit), "; if that ends there, too, look for Xid errors in dmesg")};
}

namespace {

Finding FindingOf(const CopyFault& fault, absl::Duration limit) {
  const bool alone = fault.from == fault.to;
  std::string pair = alone ? absl::StrCat("between the host and GPU ", fault.from)
                           : absl::StrCat("from GPU ", fault.from, " to GPU ", fault.to,
                                          fault.direct ? ", by P2P," : ", through host memory,");
  std::string cause = "likely cause: a GPU, its memory or its driver is faulty";
  std::string remedy = "look for Xid errors in dmesg; update the driver";
  if (fault.direct) {
    cause = "likely cause: PCIe ACS or an IOMMU stands between the GPUs, or the driver does not support P2P for them";
    remedy = "export NCCL_P2P_DISABLE=1; for speed turn ACS and the IOMMU off in the firmware, or update the driver";
  }
  switch (fault.kind) {
    case CopyFault::Kind::kWrong:
      return {Severity::kError, "p2p_copies",
              absl::StrCat("a copy ", pair, " arrives wrong: ", fault.what, "; ", cause), remedy};
    case CopyFault::Kind::kHang:
      return {Severity::kError, "p2p_copies",
              absl::StrCat("a copy ", pair, " did not end in ", absl::FormatDuration(limit), "; ", cause),
              absl::StrCat(remedy, "; or give it more time: ", MoreTime(limit))};
    default:
      return {Severity::kError, "p2p_copies", absl::StrCat("a copy ", pair, " failed: ", fault.what, "; ", cause),
              remedy};
  }
}

}  // namespace

Findings CheckCopies(const CopyReport& report) {
  Findings findings;
  for (const CopyFault& fault : report.faults) findings.push_back(FindingOf(fault, report.limit));
  if (findings.empty() && report.pairs > 0) {
    findings.push_back({Severity::kOk, "p2p_copies",
                        absl::StrCat("copies between ", report.gpus, " GPUs arrive right: ", report.direct_pairs,
                                     " of ", report.pairs, " directions by P2P, the others through host memory"),
                        ""});
  }
  return findings;
}

Findings CheckGpusOfRanks(const std::vector<bool>& sees_gpu) {
  std::vector<size_t> without;
  for (size_t r = 0; r < sees_gpu.size(); ++r) {
    if (!sees_gpu[r]) without.push_back(r);
  }
  if (without.empty() || without.size() == sees_gpu.size()) return {};
  return {{Severity::kError, "gpus_of_ranks",
           absl::StrCat("no GPU on rank", without.size() == 1 ? " " : "s ", absl::StrJoin(without, ", "),
                        ", but on others: NCCL was not tried out"),
           "give CUDA_VISIBLE_DEVICES alike on all hosts, and start no more ranks on a host than it has GPUs"}};
}

Findings Merge(const std::vector<Findings>& by_rank) {
  Findings all;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const Finding& finding : by_rank[rank]) {
      const auto known = std::find_if(all.begin(), all.end(), [&](const Finding& f) { return f.SameAs(finding); });
      Finding& entry = known == all.end() ? all.emplace_back(finding) : *known;
      if (entry.ranks.empty() || entry.ranks.back() != static_cast<int>(rank)) {
        entry.ranks.push_back(static_cast<int>(rank));
      }
    }
  }
  std::vector<std::string> versions;
  for (const Finding& f : all) {
    if (f.check == "nccl" && f.severity == Severity::kOk) {
      versions.push_back(absl::StrCat(f.text, " on rank ", f.ranks.front()));
    }
  }
  if (versions.size() > 1) {
    all.push_back({Severity::kError, "nccl_versions",
                   absl::StrCat("the ranks have different versions of NCCL: ", absl::StrJoin(versions, ", ")),
                   "install the same everywhere, or name one by DDP_NCCL_LIBRARY"});
  }
  std::stable_sort(all.begin(), all.end(), [](const Finding& a, const Finding& b) { return a.severity > b.severity; });
  return all;
}

}  // namespace doctor

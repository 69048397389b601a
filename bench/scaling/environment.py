"""The machine, the build and the launcher that figures depend on. No names of hosts or users."""

import ctypes
import glob
import os
import platform
import re
import subprocess
import time

# Never the whole environment. Names with these words are left out even if a prefix fits.
VARIABLE_PREFIXES = (
    "DDP_",
    "OMP_",
    "GOMP_",
    "DNNL_",
    "OMPI_MCA_",
    "HYDRA_",
    "UCX_",
    "NCCL_",
    "CUDA_VISIBLE_DEVICES",
    "SLURM_CPUS",
    "SLURM_NTASKS",
    "MALLOC_",
)
PRIVATE_WORDS = ("SECRET", "TOKEN", "PASSWORD", "KEY")
GPU_FIELDS = "name,driver_version,memory.total,clocks.max.sm,power.limit"


def lines_of(*command):
    """What a program prints, without colours and empty lines; nothing if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout) if done.returncode == 0 else ""
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def first_line(*command):
    """The first line that a program prints, or None."""
    return next(iter(lines_of(*command)), None)


def read_text(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def match(pattern, text):
    found = re.search(pattern, text, re.MULTILINE)
    return found.group(1).strip() if found else None


def cpus_allowed():
    return sorted(os.sched_getaffinity(0))


def physical_cores():
    """Cores that this process may use: hardware threads of one core count once, a cgroup's quota limits them."""
    base = "/sys/devices/system/cpu/cpu{}/topology/{}"
    cores = {
        (read_text(base.format(cpu, "physical_package_id")), read_text(base.format(cpu, "core_id")) or str(cpu))
        for cpu in cpus_allowed()
    }
    quota = read_text("/sys/fs/cgroup/cpu.max").split()
    limit = int(quota[0]) / int(quota[1]) if len(quota) == 2 and quota[0].isdigit() else len(cores)
    return max(1, min(len(cores), int(limit)))


def caches():
    """As "L2 1024K", of the first processor, with how many processors share each."""
    found = []
    for index in sorted(glob.glob("/sys/devices/system/cpu/cpu0/cache/index*")):
        if read_text(f"{index}/type") != "Instruction":
            found.append(
                f"L{read_text(index + '/level')} {read_text(index + '/size')} "
                f"(shared by processors {read_text(index + '/shared_cpu_list')})"
            )
    return found


def memory_mib():
    total = match(r"^MemTotal:\s*(\d+) kB", read_text("/proc/meminfo"))
    mib = int(total) // 1024 if total else 0
    limit = read_text("/sys/fs/cgroup/memory.max")
    return min(mib, int(limit) >> 20) if limit.isdigit() else mib


def gpus():
    """One dictionary per GPU that may be used; none without nvidia-smi."""
    fields = GPU_FIELDS.split(",")
    rows = [
        dict(zip(fields, map(str.strip, line.split(","))))
        for line in lines_of("nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader")
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return rows if visible is None else rows[: len([v for v in visible.split(",") if v.strip() not in ("", "-1")])]


def library_version(name, function):
    """What a C function of a library says of its version, or None: int f(int*) or size_t f(void)."""
    try:
        library = ctypes.CDLL(name)
        if name.startswith("libnccl"):
            version = ctypes.c_int()
            library[function](ctypes.byref(version))
            return version.value
        return library[function]()
    except (OSError, AttributeError):
        return None


def gpu_libraries():
    """Versions as the libraries number them: NCCL 2.21.5 is 22105, cuDNN 9.8.0 is 90800."""
    nccl = os.environ.get("DDP_NCCL_LIBRARY", "libnccl.so.2")
    return {
        "nccl": library_version(nccl, "ncclGetVersion"),
        "cudnn": library_version("libcudnn.so.9", "cudnnGetVersion"),
    }


def build_of(bin_folder):
    """Version, revision, compiler and build type of the trainers, as far as files beside them tell."""
    cache = read_text(os.path.join(bin_folder, os.pardir, "CMakeCache.txt"))
    if not cache:
        installed = read_text(os.path.join(bin_folder, "build.txt"))
        return dict(line.split("=", 1) for line in installed.splitlines() if "=" in line)
    source = match(r"^CMAKE_HOME_DIRECTORY:\w+=(.*)$", cache)
    compiler = match(r"^CMAKE_CXX_COMPILER:\w+=(.*)$", cache)
    revision = first_line("git", "-C", source, "rev-parse", "--short=12", "HEAD") if source else None
    changed = first_line("git", "-C", source, "status", "--porcelain", "--untracked-files=no") if revision else None
    build = {
        "version": match(r"^CMAKE_PROJECT_VERSION:\w+=(.*)$", cache),
        "build_type": match(r"^CMAKE_BUILD_TYPE:\w+=(.*)$", cache),
        "compiler": first_line(compiler, "--version") if compiler else None,
        "flags": match(r"^CMAKE_CXX_FLAGS:\w+=(.+)$", cache),
        "sanitizers": match(r"^DDP_SANITIZE:\w+=(.+)$", cache),
        "revision": f"{revision}{' with local changes' if changed else ''}" if revision else None,
    }
    return {key: value for key, value in build.items() if value}


def variables(environ):
    return {
        name: environ[name]
        for name in sorted(environ)
        if name.startswith(VARIABLE_PREFIXES) and not any(word in name for word in PRIVATE_WORDS)
    }


def snapshot(bin_folder, mpirun, mpi_version):
    cpuinfo = read_text("/proc/cpuinfo")
    cpus = cpus_allowed()
    found = gpus()
    packages = {read_text(f"/sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id") for cpu in cpus}
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "cpu": {
            "model": match(r"^model name\s*:\s*(.*)$", cpuinfo) or platform.processor() or platform.machine(),
            "sockets": len(packages),
            "cores": physical_cores(),
            "hardware_threads": len(cpus),
            "caches": caches(),
            "virtual_machine": bool(re.search(r"^flags.*\bhypervisor\b", cpuinfo, re.MULTILINE)),
            "governor": read_text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or None,
        },
        "numa_nodes": max(1, len(glob.glob("/sys/devices/system/node/node[0-9]*"))),
        "memory_mib": memory_mib(),
        "gpus": found,
        # How the GPUs are linked: nvidia-smi's matrix, line by line.
        "gpu_topology": lines_of("nvidia-smi", "topo", "-m") if found else [],
        "gpu_libraries": gpu_libraries() if found else {},
        "system": f"{platform.system()} {platform.release()}",
        "launcher": {"program": os.path.basename(mpirun), "version": mpi_version},
        "build": build_of(bin_folder),
        "python": platform.python_version(),
        "variables": variables(os.environ),
        "load_at_start": round(os.getloadavg()[0], 2),
    }

// SPDX-License-Identifier: Apache-2.0
// Reads whole files with checks, and writes them so that a file is never visible half written.
#ifndef EXAMPLES_DATA_FILE_H_
#define EXAMPLES_DATA_FILE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace examples {

// Returns the contents of a regular file. Errors name the path: NotFound, PermissionDenied, InvalidArgument (not a
// regular file).
absl::StatusOr<std::vector<uint8_t>> ReadFile(const std::string& path);

// A file that appears under its name only when it is complete and on the disk. It is written as `path`.tmp and synced;
// Commit renames it and syncs the folder. Until then the old file does not change, even if this process dies. The
// destructor removes a file that was not committed. If a process is killed, only `path`.tmp remains; the next process
// that writes `path` overwrites it.
//
//   auto file = AtomicFile::Create(path);
//   if (absl::Status s = (*file)->Write(data, size); !s.ok()) return s;
//   return (*file)->Commit();
class AtomicFile {
 public:
  // Errors name the path: NotFound (the folder), PermissionDenied, InvalidArgument (`path` exists and is not a regular
  // file), FailedPrecondition (another process, or another AtomicFile, is writing it).
  static absl::StatusOr<std::unique_ptr<AtomicFile>> Create(const std::string& path);

  virtual ~AtomicFile() = default;

  virtual absl::Status Write(const void* data, size_t size) = 0;
  virtual absl::Status Commit() = 0;
};

// Removes `path`.tmp if a killed process has left it, but not if a process is writing it.
void RemoveUnfinished(const std::string& path);

}  // namespace examples

#endif  // EXAMPLES_DATA_FILE_H_

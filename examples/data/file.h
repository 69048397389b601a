// Whole files: read with checks, written so that nobody ever sees half of one.
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

// The contents of a regular file. Errors name the path: NotFound, PermissionDenied, InvalidArgument (not a regular
// file).
absl::StatusOr<std::vector<uint8_t>> ReadFile(const std::string& path);

// A file that appears under its name, complete and on the disk, or not at all: written as `path`.tmp, synced, renamed,
// and the folder synced. Until Commit renames it the old file is untouched, whatever becomes of this process; destroyed
// before that, it removes what it wrote. What a killed process leaves behind is that one name, which the next one to
// write `path` takes over.
//
//   auto file = AtomicFile::Create(path);
//   if (absl::Status s = (*file)->Write(data, size); !s.ok()) return s;
//   return (*file)->Commit();
class AtomicFile {
 public:
  // Errors, which name the path: NotFound (the folder), PermissionDenied, InvalidArgument (`path` is something else
  // than a regular file), FailedPrecondition (another process, or another AtomicFile, is writing it now).
  static absl::StatusOr<std::unique_ptr<AtomicFile>> Create(const std::string& path);

  virtual ~AtomicFile() = default;

  virtual absl::Status Write(const void* data, size_t size) = 0;
  virtual absl::Status Commit() = 0;
};

// Removes `path`.tmp if a killed process has left it. What somebody writes now stays.
void RemoveUnfinished(const std::string& path);

}  // namespace examples

#endif  // EXAMPLES_DATA_FILE_H_

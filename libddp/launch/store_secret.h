// SPDX-License-Identifier: Apache-2.0
// What keeps strangers out of a TCP store: a secret, proofs that one knows it, and the file in which the ranks of one
// host find it when nobody has set one.
#ifndef LIBDDP_LAUNCH_STORE_SECRET_H_
#define LIBDDP_LAUNCH_STORE_SECRET_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ddp {

inline constexpr size_t kNonceSize = 32;
inline constexpr size_t kProofSize = 32;

// `size` bytes that nobody can foretell.
absl::StatusOr<std::string> RandomBytes(size_t size);

// HMAC-SHA256 (RFC 2104, FIPS 180-4) over the parts, each preceded by its length, so that no two lists of parts give
// the same message. kProofSize bytes.
std::string Proof(absl::string_view secret, absl::Span<const absl::string_view> parts);

// In a time that does not tell where they differ.
bool SameProof(absl::string_view a, absl::string_view b);

// A random secret in a file that only this user can read (mode 0600), named by user and port, in XDG_RUNTIME_DIR or,
// without one, in /tmp. Whoever can read it is the user that started the ranks.
class SecretFile {
 public:
  // Makes it, as a whole: nobody reads half a secret. One that an earlier run left behind is replaced;
  // PermissionDenied, with the remedy, if something of another user has the name.
  static absl::StatusOr<SecretFile> Create(int port);

  // What the file of that port holds. NotFound if there is none; PermissionDenied if it is not a regular file of this
  // user that others cannot read.
  static absl::StatusOr<std::string> Read(int port);

  static std::string PathFor(int port);

  SecretFile() = default;
  SecretFile(SecretFile&& other) noexcept;
  SecretFile& operator=(SecretFile&& other) noexcept;
  ~SecretFile() { Remove(); }

  const std::string& secret() const { return secret_; }

  // Removes the file, if it is still there and has not become another run's.
  void Remove();

 private:
  std::string path_;  // empty: there is none (any more)
  std::string secret_;
};

}  // namespace ddp

#endif  // LIBDDP_LAUNCH_STORE_SECRET_H_

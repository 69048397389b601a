// SPDX-License-Identifier: Apache-2.0
// SHA-256, computed by OpenSSL.
#ifndef EXAMPLES_TRAIN_SHA256_H_
#define EXAMPLES_TRAIN_SHA256_H_

#include <openssl/evp.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/escaping.h"

namespace examples {

class Sha256 {
 public:
  using Digest = std::array<uint8_t, 32>;

  Sha256() : context_(EVP_MD_CTX_new(), &EVP_MD_CTX_free) { EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr); }

  void Update(const void* data, size_t size) { EVP_DigestUpdate(context_.get(), data, size); }

  // Returns the digest of all data. Do not call Update afterwards.
  Digest Finish() {
    Digest digest = {};
    EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr);
    return digest;
  }

 private:
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

inline std::string ToHex(const Sha256::Digest& digest) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest.data()), digest.size()});
}

}  // namespace examples

#endif  // EXAMPLES_TRAIN_SHA256_H_

// SPDX-License-Identifier: Apache-2.0
#include "examples/data/jpeg.h"

namespace examples {
namespace {

class NoDecoder final : public JpegDecoder {
 public:
  absl::Status Decode(const std::string&, int, int, int, uint8_t*) override {
    return absl::UnimplementedError("this build cannot read JPEG files");
  }
};

}  // namespace

bool HaveJpeg() { return false; }
std::unique_ptr<JpegDecoder> MakeJpegDecoder() { return std::make_unique<NoDecoder>(); }

}  // namespace examples

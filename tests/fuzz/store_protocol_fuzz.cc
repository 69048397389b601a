// SPDX-License-Identifier: Apache-2.0
// The TCP store's protocol. The first byte says who is lied to, the rest is what arrives:
//
//   0  the server, by a stranger            3  a client, by what answers instead of a server
//   1  the server, by a rank                4  a client that has shaken hands, by the server
//   2  as 1, in pieces of 7 bytes
//
// Nothing may crash or be read that is not there; a stranger gets a greeting and at most one verdict; a rank gets
// answers to what it asked for, and another rank still gets its own.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "libddp/launch/store_protocol.h"
#include "libddp/launch/store_secret.h"

namespace {

using ddp::StoreService;

const char kSecret[] = "secret";
const char kRunId[] = "run";

void Require(bool condition) {
  if (!condition) std::abort();
}

// A connection to a service, and what has been sent through it, cut into frames.
struct Peer {
  Peer(StoreService& service, char nonce_byte)
      : connection(service, std::string(ddp::kNonceSize, nonce_byte), [this](std::string bytes) { sent += bytes; }) {}

  std::vector<std::string> TakeFrames() {
    ddp::FrameReader reader(ddp::kMaxStoreFrame);
    reader.Append(sent);
    sent.clear();
    std::vector<std::string> frames;
    while (true) {
      const auto frame = reader.Next();
      Require(frame.ok());
      if (!frame->has_value()) return frames;
      frames.emplace_back(**frame);
    }
  }

  // Becomes a rank.
  void Authenticate() {
    ddp::ClientHandshake handshake(kSecret, kRunId, std::string(ddp::kNonceSize, 'c'));
    const absl::StatusOr<std::string> hello = handshake.Answer(TakeFrames().at(0));
    Require(hello.ok() && connection.Receive(*hello).ok());
    Require(handshake.Check(TakeFrames().at(0)).ok() && connection.authenticated());
  }

  std::string sent;
  StoreService::Connection connection;
};

void LieToServer(const std::string& input, bool as_rank, size_t piece) {
  StoreService service(kSecret, kRunId);
  Peer honest(service, 'h');
  honest.Authenticate();
  Require(honest.connection.Receive(ddp::EncodeRequest({ddp::StoreOp::kGet, 1, "wanted", ""})).ok());
  {
    Peer liar(service, 'l');
    if (as_rank) liar.Authenticate();
    for (size_t at = 0; at < input.size(); at += piece) {
      if (!liar.connection.Receive(absl::string_view(input).substr(at, piece)).ok()) break;
    }
    const std::vector<std::string> frames = liar.TakeFrames();
    if (as_rank) {
      for (const std::string& frame : frames) Require(ddp::DecodeAnswer(frame).ok());
    } else {
      Require(!liar.connection.authenticated() && frames.size() <= 2);
    }
  }
  // What the liar may have set itself is not to be found as the answer to another's request number.
  Require(honest.connection.Receive(ddp::EncodeRequest({ddp::StoreOp::kSet, 2, "wanted", "value"})).ok());
  std::set<uint64_t> answered;
  for (const std::string& frame : honest.TakeFrames()) {
    const auto answer = ddp::DecodeAnswer(frame);
    Require(answer.ok() && answered.insert(answer->id).second);
  }
  Require(answered == std::set<uint64_t>{1, 2});
}

void LieToClient(const std::string& input) {
  ddp::FrameReader reader(ddp::kMaxHandshakeFrame);
  ddp::ClientHandshake handshake(kSecret, kRunId, std::string(ddp::kNonceSize, 'c'));
  reader.Append(input);
  const auto greeting = reader.Next();
  if (!greeting.ok() || !greeting->has_value()) return;
  if (!handshake.Answer(**greeting).ok()) return;
  const auto verdict = reader.Next();
  if (!verdict.ok() || !verdict->has_value()) return;
  Require(!handshake.Check(**verdict).ok());  // it would have guessed the proof
}

void AnswerClient(const std::string& input) {
  ddp::FrameReader reader(ddp::kMaxStoreFrame);
  for (size_t at = 0; at < input.size(); at += 11) {
    reader.Append(absl::string_view(input).substr(at, 11));
    while (true) {
      const auto frame = reader.Next();
      if (!frame.ok()) return;
      if (!frame->has_value()) break;
      const auto answer = ddp::DecodeAnswer(**frame);
      // What was understood is said again in the same way.
      if (answer.ok()) Require(ddp::EncodeAnswer(*answer).substr(4) == **frame);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string input(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 5) {
    case 0:
      LieToServer(input, false, std::max<size_t>(1, input.size()));
      break;
    case 1:
      LieToServer(input, true, std::max<size_t>(1, input.size()));
      break;
    case 2:
      LieToServer(input, true, 7);
      break;
    case 3:
      LieToClient(input);
      break;
    default:
      AnswerClient(input);
  }
  return 0;
}

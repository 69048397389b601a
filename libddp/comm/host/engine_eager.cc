// Broadcasts of so few bytes that they travel with the root's announcement, the eager protocol of message passing: the
// root is through once it has announced one, and a receiver needs nobody but the root. The ring of slots bounds how far
// the root may be ahead. It decides: where there is no room for the data, the broadcast meets as larger ones do.
//
// All ranks must agree nevertheless. A rank takes an eager broadcast only if it has called what the root has, and
// retires it only then; the root retires its own once all peers have done so, or once it has seen that all have
// announced the same. A rank that calls something else waits for everybody's announcement, or for that of the rank
// which it believes to be the root, or is the root in its own eyes: in each case somebody compares two calls that
// differ, and fails the group.
#include <algorithm>

#include "libddp/base/spin.h"
#include "libddp/comm/host/engine.h"

namespace ddp {
namespace {

constexpr size_t kAheadBytes = 2048;  // as many cache lines as can be under way at once

}  // namespace

// The root has announced it; at the root, all ranks have.
void Engine::MakeReadyEager(Operation* operation) {
  const bool root = IsEagerRoot(*operation);
  for (int r = 0; root && r < options_.size; ++r) {
    if (!Agrees(*operation, options_.rank, r)) return;
  }
  if (!root && !Agrees(*operation, operation->key().root, options_.rank)) return;
  operation->mode = Operation::Mode::kInline;
  operation->ready = true;
}

// The root may be ahead: what it has laid out for the next broadcast is then on its way while this one is finished.
void Engine::TakeEager(Operation* operation) {
  const uint64_t next = operation->sequence + 1;
  const int root = operation->key().root;
  const Announcement& announcement = control_.slot(next, root).announcement;
  __builtin_prefetch(&announcement);
  operation->TakeInline(control_, options_.rank, options_.size);
  if (announcement.sequence.load(std::memory_order_relaxed) != next + 1) return;
  const char* const data = control_.inlined(next, root, operation->in_bytes());
  const size_t bytes = std::min(operation->in_bytes(), kAheadBytes);
  for (size_t line = 0; line < bytes; line += kCacheLine) __builtin_prefetch(data + line);
}

}  // namespace ddp

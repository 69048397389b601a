// The thread that does a process's communication while none of its own threads does.
#ifndef LIBDDP_COMM_PROGRESS_THREAD_H_
#define LIBDDP_COMM_PROGRESS_THREAD_H_

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace ddp {

// Looks at its engines once a millisecond while operations are being launched, ten times a second otherwise. It takes
// over only where nobody has driven an engine since its last look: waking it per operation would cost 20 to 35 us each,
// and a second thread on the core would take time from the backward pass. Thread-safe.
class ProgressThread {
 public:
  class Client {
   public:
    virtual ~Client() = default;
    // Does pending work that nobody else is doing; returns whether anything is pending.
    virtual bool Tick() = 0;
  };

  ProgressThread() = default;
  ~ProgressThread();

  void Add(Client* client);
  // Returns when no Tick of the client is running, nor will be.
  void Remove(Client* client);

  // Something has been launched. A load, unless the thread was at rest.
  void Notify() {
    if (resting_.load(std::memory_order_relaxed)) WakeUp();
  }

 private:
  void WakeUp();
  void Run();

  std::atomic<bool> resting_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Client*> clients_;
  bool stop_ = false;
  std::thread thread_;  // started with the first client
};

}  // namespace ddp

#endif  // LIBDDP_COMM_PROGRESS_THREAD_H_

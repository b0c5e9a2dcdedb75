// Return type of every function of the C++ API. Nothing under cuda/ or csrc/cpu/ throws.
//
// csrc turns a failed Status into a Python exception that also names the tensors.
#pragma once

#include <string>
#include <utility>

namespace qao {

class Status {
 public:
  Status() = default;
  // `remedy`: what the user can do; empty if the error is a bug in qao.
  static Status error(std::string message, std::string remedy = "") {
    Status status;
    status.message_ = std::move(message);
    status.remedy_ = std::move(remedy);
    return status;
  }

  bool ok() const { return message_.empty(); }
  const std::string& message() const { return message_; }
  const std::string& remedy() const { return remedy_; }

 private:
  std::string message_;  // empty on success
  std::string remedy_;
};

}  // namespace qao

// SPDX-License-Identifier: Apache-2.0
// Files of the system and of users as text.
#ifndef LIBDDP_BASE_TEXT_OF_FILE_H_
#define LIBDDP_BASE_TEXT_OF_FILE_H_

#include <fstream>
#include <sstream>
#include <string>

namespace ddp {

// Empty for what is no file, or cannot be read: an iterator over it would throw where the path names a folder.
inline std::string TextOfFile(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

}  // namespace ddp

#endif  // LIBDDP_BASE_TEXT_OF_FILE_H_

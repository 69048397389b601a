# SPDX-License-Identifier: Apache-2.0
"""Names C's constants without a comment in what Doxygen has read, which does not look at them itself. Ends with 1 if there is one.

Usage: python3 docs/site/constants.py FOLDER_OF_XML
"""
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

found = 0
for path in sorted(Path(sys.argv[1]).glob("*_8h.xml")):
    header = xml.parse(path).getroot().find("compounddef")
    for constant in header.iter("enumvalue"):
        if not "".join(constant.find("briefdescription").itertext()).strip():
            print(f"{header.find('location').get('file')}: {constant.findtext('name')} has no comment", file=sys.stderr)
            found += 1
sys.exit(1 if found else 0)

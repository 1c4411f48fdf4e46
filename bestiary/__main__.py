import sys

from bestiary.cli import main

sys.exit(main())

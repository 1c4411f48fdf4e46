import sys

from bestiary.cli.main import main

sys.exit(main())
